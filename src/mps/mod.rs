//! The only files that know nvidia-cuda-mps-control: how it is called, what it answers, the files it leaves. Facts
//! without a source were measured with the control programs of drivers 535, 550 and 555.

mod control;
mod limits;
mod log;
mod log_file;
mod pipe;
mod server;

pub use control::{AskError, CONTROL, Control, unless_interrupted};
pub use limits::{FoundLimits, Scope, ServerLimits};
pub use log::{LogMark, log_end};
pub use log_file::LogFile;
pub use pipe::{
    Keeper, Socket, clear, coming_up, control_path, control_socket, keeper, keeper_beside,
    lacks_privileged_socket, lock_holder, logs_into, named_by_pid_file,
};
pub use server::{ServerState, Termination};
