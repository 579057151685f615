//! One server of a daemon: what it is asked, and how it is told to let go of a client.

use std::time::Duration;

use super::control::{AskError, Control, pids};

/// The state of a server, in the daemon's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerState {
    /// It is coming up; programs wait for it.
    Initializing,
    /// It serves.
    Active,
    /// A client has met a fatal error. Nobody new is served until all clients on the GPU have ended.
    Fault,
}

impl ServerState {
    /// The daemon's word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Initializing => "INITIALIZING",
            Self::Active => "ACTIVE",
            Self::Fault => "FAULT",
        }
    }

    /// The state that an answer tells; `None` where it tells none, as on 535, which does not know the question.
    fn told_by(answer: &str) -> Option<Self> {
        [Self::Initializing, Self::Active, Self::Fault]
            .into_iter()
            .find(|state| state.word() == answer.trim())
    }
}

/// What became of a request to let go of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Termination {
    /// The client has no GPU work and no server any more. It sees CUDA error 810.
    Done,
    /// The daemon did nothing, and said this.
    Refused(String),
}

impl Termination {
    /// Both exit with 0. The answer's last line is a status of its own: `0`, or `1` behind up to two lines of reasons.
    fn told_by(answer: &str) -> Self {
        let mut lines: Vec<&str> = answer.lines().map(str::trim).collect();
        match lines.pop() {
            Some("0") => Self::Done,
            Some(last) => {
                if last != "1" || lines.is_empty() {
                    lines.push(last);
                }
                Self::Refused(lines.join("; "))
            }
            None => Self::Refused("nothing".to_owned()),
        }
    }
}

impl Control<'_> {
    /// The pids of the clients of one server; `None` if the daemon has no such server any more.
    pub fn clients(&self, server: i32, limit: Duration) -> Result<Option<Vec<i32>>, AskError> {
        let answer = self.ask(&format!("get_client_list {server}"), limit)?;
        Ok((!is_unknown(server, &answer)).then(|| pids(&answer)))
    }

    /// The state of one server, where the daemon tells it.
    pub fn server_state(
        &self,
        server: i32,
        limit: Duration,
    ) -> Result<Option<ServerState>, AskError> {
        let answer = self.ask(&format!("get_server_status {server}"), limit)?;
        Ok(ServerState::told_by(&answer))
    }

    /// Has the daemon take a client off the GPU, which waits for it. A session that is dropped is repeated, so a client may
    /// be refused that is gone by then.
    pub fn terminate_client(
        &self,
        server: i32,
        client: i32,
        limit: Duration,
    ) -> Result<Termination, AskError> {
        let answer = self.ask(&format!("terminate_client {server} {client}"), limit)?;
        Ok(Termination::told_by(&answer))
    }
}

/// Whether an answer says that there is no such server.
fn is_unknown(server: i32, answer: &str) -> bool {
    let unknown = format!("Server {server} not found");
    answer
        .lines()
        .any(|line| line.trim().trim_end_matches('!') == unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_one_of_the_daemons_words() {
        let told = ServerState::told_by;
        assert_eq!(told("INITIALIZING"), Some(ServerState::Initializing));
        assert_eq!(told("ACTIVE\n"), Some(ServerState::Active));
        assert_eq!(told("FAULT"), Some(ServerState::Fault));
        for other in [
            "",
            "Unknown command \"get_server_status\"",
            "Server 1 not found",
            "A server PID is required",
        ] {
            assert_eq!(told(other), None, "{other}");
        }
    }

    #[test]
    fn only_a_last_line_of_0_is_a_success() {
        assert_eq!(Termination::told_by("0"), Termination::Done);
        assert_eq!(Termination::told_by("a remark\n0\n"), Termination::Done);
        for (answer, said) in [
            (
                "Server 1 not found\nServer 1 not found!\n1",
                "Server 1 not found; Server 1 not found!",
            ),
            ("Invalid process 7!\n1", "Invalid process 7!"),
            ("1", "1"),
            ("", "nothing"),
            ("0\nInvalid process 7!\n1", "0; Invalid process 7!"),
            (
                "Unknown command \"terminate_client\"",
                "Unknown command \"terminate_client\"",
            ),
        ] {
            let refused = Termination::Refused(said.to_owned());
            assert_eq!(Termination::told_by(answer), refused, "{answer}");
        }
    }

    #[test]
    fn a_server_that_is_gone_is_told_from_one_without_clients() {
        assert!(is_unknown(12, "Server 12 not found"));
        assert!(is_unknown(12, "Server 12 not found!\n1"));
        assert!(!is_unknown(12, ""));
        assert!(!is_unknown(1, "Server 12 not found"));
    }
}
