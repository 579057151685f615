//! control.log and server.log: what the faults that they tell of mean. Pure.
//! By which words a line is known stands in `log_line`.

use crate::log_line::{Sign, words};

/// A fault that a log tells of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Whether programs cannot work because of it, or only may not.
    pub fatal: bool,
    /// What happened, in words.
    pub what: String,
    /// What to do about it.
    pub remedy: &'static str,
}

/// How many servers may fail in a row until it is a loop: a client gives up after six.
const LOOP: usize = 3;

/// What each line tells of.
fn signs(log: &str) -> Vec<Option<Sign>> {
    log.lines().map(Sign::of).collect()
}

/// The faults in control.log; the last lines of server.log say why a server died.
pub fn control_faults(control: &str, server: &str) -> Vec<Fault> {
    let all = signs(control);
    let last = |lines: &[Option<Sign>], sign| lines.iter().rposition(|said| *said == Some(sign));
    // What came before is another daemon's.
    let lines = &all[last(&all, Sign::DaemonStarts).unwrap_or(0)..];
    let said = |sign| lines.contains(&Some(sign));
    let mut faults = Vec::new();
    let last_ready = last(lines, Sign::ServerReady);
    let failures = lines[last_ready.map_or(0, |at| at + 1)..]
        .iter()
        .filter(|said| **said == Some(Sign::ServerFailed))
        .count();
    if failures >= LOOP {
        faults.push(Fault {
            fatal: true,
            what: format!(
                "the server cannot start: it ended {failures} times in a row{}",
                last_words(server)
            ),
            remedy: "tail server.log in the log directory; check the GPU with nvidia-smi",
        });
    } else if failures > 0 {
        faults.push(Fault {
            fatal: false,
            what: format!("a server ended with an error{}", last_words(server)),
            remedy: "tail server.log in the log directory",
        });
    }
    if said(Sign::OtherUser) {
        faults.push(Fault {
            fatal: false,
            what: "a program of another user asked for a server, which a user's daemon cannot give"
                .to_owned(),
            remedy: "each user starts a daemon of his own: uni-cumps start",
        });
    }
    if let Some(at) = last(lines, Sign::ClientWaits)
        && failures == 0
        && last_ready < Some(at)
    {
        faults.push(Fault {
            fatal: false,
            what: "a program waits for a server that has not become ready".to_owned(),
            remedy: "wait, or look why: tail server.log in the log directory",
        });
    }
    if said(Sign::NoSuchDevice) {
        faults.push(Fault {
            fatal: false,
            what: "a memory limit named a GPU that the daemon does not have, and was dropped"
                .to_owned(),
            remedy: "name the GPU by its number within the daemon, 0 for the only one",
        });
    }
    faults
}

/// Why the last server died, in its own words.
fn last_words(server: &str) -> String {
    let telling = |line: &&str| Sign::of(line) == Some(Sign::CannotStart);
    match server.lines().map(words).rfind(telling) {
        Some(words) => format!(", saying {words:?}"),
        None => String::new(),
    }
}

/// A client set-up takes far less.
const STUCK_SECONDS: u64 = 300;

/// The faults in server.log. `idle_seconds` is the time since its last line.
pub fn server_faults(server: &str, idle_seconds: u64) -> Vec<Fault> {
    let lines: Vec<Option<Sign>> = server
        .lines()
        .filter(|line| !line.trim().is_empty())
        .map(Sign::of)
        .collect();
    let last = |sign| lines.iter().rposition(|said| *said == Some(sign));
    let mut faults = Vec::new();
    let fatal = last(Sign::FatalGpuError);
    if fatal.is_some() && last(Sign::ServerStarted) < fatal {
        faults.push(Fault {
            fatal: false,
            what: "a program made a fatal GPU error, which ends every program of the GPU".to_owned(),
            remedy: "restart the programs; new ones get CUDA error 807 until all old ones have ended",
        });
    }
    if last(Sign::TooManyClients).is_some() {
        faults.push(Fault {
            fatal: false,
            what: "a program was refused: the GPU takes no more clients (CUDA error 808)"
                .to_owned(),
            remedy: "start fewer programs, or export CUDA_DEVICE_MAX_CONNECTIONS=2",
        });
    }
    if last(Sign::TooManyConnections).is_some() {
        faults.push(Fault {
            fatal: false,
            what: "a program was refused: the GPU takes no more connections (CUDA error 809)"
                .to_owned(),
            remedy: "export CUDA_DEVICE_MAX_CONNECTIONS=2 for the programs",
        });
    }
    if lines.last() == Some(&Some(Sign::WorkerBegins)) && idle_seconds >= STUCK_SECONDS {
        faults.push(Fault {
            fatal: false,
            what: format!("a program's set-up has been stuck for {} minutes", idle_seconds / 60),
            remedy: "check that the program and the daemon share /dev/shm and the IPC namespace, and have one uid",
        });
    }
    faults
}

/// What a CUDA error of MPS means and what to do, by NVIDIA's documentation.
pub(super) fn explain(code: u32) -> Option<&'static str> {
    Some(match code {
        805 => {
            "the daemon answered and has no usable server: see server.log, and that programs and daemon have one uid"
        }
        806 => "the server went away while a program talked to it: restart the program",
        807 => {
            "the server is not ready, or recovers from a fault: wait until all old programs have ended"
        }
        808 => "the GPU takes no more clients: start fewer programs",
        809 => "the GPU takes no more connections: export CUDA_DEVICE_MAX_CONNECTIONS=2",
        810 => "the program was terminated through the daemon: restart it",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamped(lines: &[&str]) -> String {
        let mut log = String::from(
            "[2026-11-29 16:44:38.001 Control 100] Starting control daemon using socket /p/control\n",
        );
        for line in lines {
            log.push_str(&format!("[2026-11-29 16:44:38.890 Control 100] {line}\n"));
        }
        log
    }

    #[test]
    fn ordinary_lines_are_no_faults() {
        let control = stamped(&[
            "Accepting connection...",
            "User did not send valid credentials",
            "Unable to accept connection",
            "NEW UI",
            "Cmd:get_server_list",
            "UI closed",
            "NEW CLIENT 5 from user 0: Server is not ready, push client to pending list",
            "Starting new server 12 for user 0",
            "NEW SERVER 12: Ready",
            "Removed Shm file at ",
        ]);
        assert_eq!(control_faults(&control, ""), []);
        let server = "[x Server 12] Server has started\n[x Server 12] Receive command failed, assuming client exit\n[x Server 12] Client process disconnected\n";
        assert_eq!(server_faults(server, 100_000), []);
    }

    #[test]
    fn a_server_that_dies_again_and_again_is_a_loop_with_its_reason() {
        let round = [
            "Starting new server 12 for user 0",
            "Server 12 exited with status 1",
        ];
        let control = stamped(&round.repeat(5));
        let server =
            "[x Other 12] Driver initialization failed with: no CUDA-capable device is detected\n";
        let faults = control_faults(&control, server);
        assert!(faults[0].fatal);
        assert_eq!(
            faults[0].what,
            "the server cannot start: it ended 5 times in a row, saying \"Driver initialization failed with: no CUDA-capable device is detected\""
        );
        // An earlier daemon's loop is history.
        let restarted = control + &stamped(&[]);
        assert_eq!(control_faults(&restarted, server), []);
    }

    #[test]
    fn each_planted_fault_is_told_in_words() {
        let one = |faults: Vec<Fault>, words: &str| {
            assert_eq!(faults.len(), 1, "{faults:?}");
            assert!(faults[0].what.contains(words), "{faults:?}");
        };
        one(
            control_faults(
                &stamped(&["Failed to start server using uid 1002. Operation not permitted"]),
                "",
            ),
            "another user",
        );
        one(
            control_faults(
                &stamped(&[
                    "NEW CLIENT 5 from user 0: Server is not ready, push client to pending list",
                ]),
                "",
            ),
            "waits for a server",
        );
        one(
            control_faults(&stamped(&["Invalid device ordinal!"]), ""),
            "memory limit",
        );
        one(
            server_faults(
                "Failed to accept new client. Maximum number of clients (48) reached.",
                0,
            ),
            "no more clients",
        );
        one(
            server_faults("Reached maximum number of device connections.", 0),
            "no more connections",
        );
        one(
            server_faults(
                "Server has started\nServer is handling a fatal GPU error.",
                0,
            ),
            "fatal GPU error",
        );
        one(
            server_faults("Creating worker thread", 600),
            "stuck for 10 minutes",
        );
        assert_eq!(server_faults("Creating worker thread", 10), []);
    }

    #[test]
    fn the_errors_of_mps_are_explained() {
        assert!((805..=810).all(|code| explain(code).is_some()));
        assert_eq!(explain(100), None);
    }
}
