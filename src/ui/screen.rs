//! A screen of its own, on which an answer is drawn again and again.

use super::{Answer, Tone, Ui, printable, toned};

/// The alternate screen, without a cursor; and back to what was there before.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

impl Ui<'_> {
    /// Whether standard output can be drawn upon: a terminal, and no trace of calls between the lines.
    pub fn can_draw(&self) -> bool {
        self.out_is_terminal && !self.verbose
    }

    /// Takes a screen of its own.
    pub fn enter_screen(&mut self) {
        self.write_out(ENTER);
    }

    /// Gives the terminal back as it was.
    pub fn leave_screen(&mut self) {
        self.write_out(LEAVE);
    }

    /// An answer as a person would see it, to be drawn.
    pub fn drawn(&self, answer: &impl Answer) -> String {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut ui = Ui::new((&mut out, true), (&mut err, true), self.out_has_color);
        (ui.out_has_color, ui.err_has_color) = (self.out_has_color, self.out_has_color);
        ui.quiet = self.quiet;
        answer.show(&mut ui);
        out.append(&mut err);
        String::from_utf8_lossy(&out).into_owned()
    }

    /// Draws lines over what is on the screen, below a heading. What is too wide or too long for it is left out.
    pub fn draw(&mut self, heading: &str, drawing: &str, rows: usize) {
        let heading = toned(&printable(heading), Tone::Faint, self.out_has_color);
        let mut lines: Vec<&str> = vec![&heading, ""];
        lines.extend(drawing.lines());
        let left_out = match lines.len() > rows {
            true => lines.len() - rows.saturating_sub(1),
            false => 0,
        };
        let more = format!("… {left_out} more lines");
        if left_out > 0 {
            lines.truncate(rows.saturating_sub(1));
            lines.push(&more);
        }
        // Each line ends with its erasure, so that nothing flickers; a line that is too wide goes on over its own end.
        let text = lines.join("\x1b[K\n");
        self.write_out(&format!("\x1b[H\x1b[?7l{text}\x1b[K\x1b[J\x1b[?7h"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(drawing: &str, rows: usize) -> String {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        Ui::new((&mut out, true), (&mut err, true), false).draw("head", drawing, rows);
        let text = String::from_utf8(out).unwrap();
        let text = text.strip_prefix("\x1b[H\x1b[?7l").unwrap();
        let text = text.strip_suffix("\x1b[K\x1b[J\x1b[?7h").unwrap();
        text.replace("\x1b[K\n", "\n")
    }

    #[test]
    fn what_does_not_fit_is_counted() {
        assert_eq!(draw("a\nb\nc\n", 5), "head\n\na\nb\nc");
        assert_eq!(draw("a\nb\nc\n", 4), "head\n\na\n… 2 more lines");
        assert_eq!(draw("a\nb\nc\n", 1), "… 5 more lines");
    }
}
