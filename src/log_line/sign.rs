//! What a line tells of, by its words. Texts: NVIDIA's programs of drivers 535 to 580.
//!
//! Every client makes a probe without credentials first, and every client's ordinary end reads like a broken
//! connection; such lines are noise.

/// What a line says, without blanks and without what stands before it in brackets: what is meant is plain also where a
/// driver writes its stamps in another form.
pub fn words(line: &str) -> &str {
    let line = line.trim();
    match line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("] "))
    {
        Some((_, text)) => text,
        None => line,
    }
}

/// How a line is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Level {
    /// It reads like a fault and is none
    Noise,
    /// The ordinary course of things
    Info,
    /// It may be a fault, or tells of force
    Warning,
    /// Something failed
    Error,
}

impl Level {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Noise => "noise",
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }

    /// The level of a line.
    pub fn of(line: &str) -> Self {
        let text = words(line);
        if let Some(sign) = Sign::of(text) {
            return sign.level();
        }
        let begins = |words: &[&str]| words.iter().any(|word| text.starts_with(word));
        let contains = |words: &[&str]| words.iter().any(|word| text.contains(word));
        if begins(&NOISE) {
            Self::Noise
        } else if begins(&["Cmd:"]) {
            // What somebody has asked, in his own words.
            Self::Info
        } else if begins(&["Warning"]) || contains(&WARNING) {
            Self::Warning
        } else if contains(&ERROR) {
            Self::Error
        } else {
            Self::Info
        }
    }
}

const NOISE: [&str; 4] = [
    "User did not send valid credentials",
    "Unable to accept connection",
    "Receive command failed, assuming client exit",
    "Removed Shm file at",
];

const WARNING: [&str; 11] = [
    "Force shutting down",
    "Forcefully terminating",
    "Server will not shutdown",
    "Try shutting down server",
    "Control will try shutting down",
    "is INACTIVE",
    "Teardown in progress",
    "is invisible to this MPS server",
    "is not supported by this MPS server",
    "filtered out",
    "Not enough privilege",
];

const ERROR: [&str; 14] = [
    "Failed",
    "failed",
    "Unable to",
    "Cannot ",
    "Internal error",
    "fatal exception",
    "sticky error",
    "Invalid ",
    "Insufficient privileges",
    "not found",
    "not a valid GPU ID",
    "log recorder error",
    "must be 0 or 1",
    "rror: ",
];

/// A line that decides something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// The control daemon begins.
    DaemonStarts,
    /// A server takes programs, as the control daemon tells it.
    ServerReady,
    /// A server has ended with a status other than 0.
    ServerFailed,
    /// A server was asked for by a user that the daemon cannot become.
    OtherUser,
    /// A program waits for a server.
    ClientWaits,
    /// A memory limit names a GPU that the daemon does not have.
    NoSuchDevice,
    /// A server says why it cannot start.
    CannotStart,
    /// A server takes programs, as it tells itself.
    ServerStarted,
    /// A program has brought the GPU into a fault.
    FatalGpuError,
    /// The GPU takes no more clients.
    TooManyClients,
    /// The GPU takes no more connections.
    TooManyConnections,
    /// A server begins to serve a client.
    WorkerBegins,
}

impl Sign {
    /// What a line tells of.
    pub fn of(line: &str) -> Option<Self> {
        let text = words(line);
        let says = |words: &str| text.contains(words);
        let begins = |words: &str| text.starts_with(words);
        let failed = || {
            let status = text.rsplit_once("exited with status ");
            begins("Server ") && status.is_some_and(|(_, status)| status != "0")
        };
        Some(match () {
            // What somebody has asked, in his own words.
            () if begins("Cmd:") => return None,
            () if begins("Starting control daemon") => Self::DaemonStarts,
            () if begins("NEW SERVER") && text.ends_with("Ready") => Self::ServerReady,
            () if failed() => Self::ServerFailed,
            () if begins("Failed to start server using uid") => Self::OtherUser,
            () if says("push client to pending list") => Self::ClientWaits,
            () if says("Invalid device ordinal") => Self::NoSuchDevice,
            () if begins("Driver initialization failed") || begins("Failed to start") => {
                Self::CannotStart
            }
            () if says("Server has started") => Self::ServerStarted,
            () if says("Server is handling a fatal GPU error")
                || says("encountered a fatal GPU error") =>
            {
                Self::FatalGpuError
            }
            () if says("Maximum number of clients") => Self::TooManyClients,
            () if says("Reached maximum number of device connections") => Self::TooManyConnections,
            () if text == "Creating worker thread" => Self::WorkerBegins,
            () => return None,
        })
    }

    fn level(self) -> Level {
        match self {
            Self::ServerFailed
            | Self::OtherUser
            | Self::NoSuchDevice
            | Self::CannotStart
            | Self::FatalGpuError
            | Self::TooManyClients
            | Self::TooManyConnections => Level::Error,
            Self::DaemonStarts
            | Self::ServerReady
            | Self::ClientWaits
            | Self::ServerStarted
            | Self::WorkerBegins => Level::Info,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_of_the_drivers_have_their_levels() {
        for (level, texts) in [
            (
                Level::Noise,
                &[
                    "User did not send valid credentials",
                    "Unable to accept connection",
                    "Receive command failed, assuming client exit",
                    "Removed Shm file at ",
                ][..],
            ),
            (
                Level::Info,
                &[
                    "Starting control daemon using socket /tmp/p/control",
                    "Cmd:set_active_thread_percentage 7 failed",
                    "Cmd:Invalid device ordinal",
                    "NEW CLIENT 5 from user 0: Server is not ready, push client to pending list",
                    "NEW SERVER 12: Ready",
                    "Server 12 exited with status 0",
                    "Exit with status 0",
                    "Server is ready, and no error",
                    "Client process disconnected",
                    "Creating worker thread",
                    "",
                ],
            ),
            (
                Level::Warning,
                &[
                    "Warning: Failed writing log files to directory [/l]. No logs will be available.",
                    "Force shutting down server 12",
                    "Server 12 has 1 active worker threads. Server will not shutdown.",
                    "Not enough privilege to execute quit command",
                    "Status of client {5, 1} is INACTIVE",
                ],
            ),
            (
                Level::Error,
                &[
                    "Server 12 exited with status 1",
                    "Server 12 exited with status 139",
                    "Server encountered a fatal exception. Shutting down",
                    "Failed to start server using uid 1002. Operation not permitted",
                    "Driver initialization failed with: no CUDA-capable device is detected",
                    "Server is handling a fatal GPU error.",
                    "Invalid device ordinal!",
                    "Failed to accept new client. Maximum number of clients (48) reached.",
                ],
            ),
        ] {
            for text in texts {
                assert_eq!(Level::of(text), level, "{text}");
            }
        }
        assert!(Level::Error > Level::Warning && Level::Info > Level::Noise);
    }
}
