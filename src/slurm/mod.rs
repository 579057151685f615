//! What happens on a node of a Slurm cluster: what a job asks for, the daemons that jobs share there, and what is kept of
//! both. The daemons run as the users of the jobs; everything that is kept is root's.

mod account;
mod daemons;
mod job;
mod request;
mod state;

pub use account::become_user;
pub use daemons::Node;
pub use job::{Job, JobId, gpus_of_step, node_name};
pub use request::{Request, RequestError};
pub use state::{Address, JobRecord, Outcome};
