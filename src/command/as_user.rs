//! The hidden command that becomes a job's user and then is another command of ours.

use crate::cli::AsUserArgs;
use crate::error::Error;
use crate::slurm;

pub(super) fn run(args: &AsUserArgs) -> Result<u8, Error> {
    Err(slurm::become_user(args.uid, args.gid, &args.words))
}
