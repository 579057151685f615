//! The checkpoint of another CUDA process, as `cuda.h` has it since CUDA 12.8.
//!
//! Each argument of these calls is 64 bytes in every version from 12.8 to 13.5, and all that a version does not know must
//! be zero. So the one layout below, zeroed, serves them all. None but a restore needs `cuInit`.

use std::ffi::{c_int, c_void};

use super::{CuResult, CuUuid, Driver, DriverFailure};
use crate::checkpoint::{Call, GpuMap, Since};

/// `CUcheckpointLockArgs`.
#[repr(C)]
struct LockArgs {
    timeout_ms: u32,
    reserved: [u32; 15],
}

/// `CUcheckpointGpuPair`.
#[repr(C)]
struct GpuPair {
    old: CuUuid,
    new: CuUuid,
}

/// `CUcheckpointRestoreArgs` of 13.0. For versions that know more, the rest is zero.
#[repr(C)]
struct RestoreArgs {
    pairs: *mut GpuPair,
    count: u32,
    reserved: [u32; 13],
}

/// `CUcheckpointCheckpointArgs` and `CUcheckpointUnlockArgs`. 13.4 has a pointer in the first, and null means host memory.
#[repr(C)]
struct ReservedArgs([u64; 8]);

const _: () = {
    assert!(size_of::<LockArgs>() == 64);
    assert!(size_of::<GpuPair>() == 32);
    assert!(size_of::<RestoreArgs>() == 64);
    assert!(std::mem::offset_of!(RestoreArgs, count) == 8);
    assert!(size_of::<ReservedArgs>() == 64);
};

/// All of the calls that act have this form: a pid, and arguments that the function knows.
type Act = unsafe extern "C" fn(c_int, *mut c_void) -> CuResult;
/// `cuCheckpointProcessGetState` and `cuCheckpointProcessGetRestoreThreadId`. A state is 32 bits in which a newer driver
/// may say something new.
type Get = unsafe extern "C" fn(c_int, *mut u32) -> CuResult;

/// A driver that has the checkpoint calls.
pub struct Checkpointer {
    driver: Driver,
    version: i32,
    state: Get,
    thread: Get,
    lock: Act,
    checkpoint: Act,
    restore: Act,
    unlock: Act,
}

impl Checkpointer {
    /// Opens the driver. Whether it has the calls its symbols say; the version only words the refusal.
    pub fn open() -> Result<Self, DriverFailure> {
        let driver = Driver::open()?;
        let version = driver.version()?;
        let outdated = |_| outdated(version, Since::CHECKPOINT);
        let get = |name| driver.function::<Get>(name).map_err(outdated);
        let act = |name| driver.function::<Act>(name).map_err(outdated);
        Ok(Self {
            state: get("cuCheckpointProcessGetState")?,
            thread: get("cuCheckpointProcessGetRestoreThreadId")?,
            lock: act("cuCheckpointProcessLock")?,
            checkpoint: act("cuCheckpointProcessCheckpoint")?,
            restore: act("cuCheckpointProcessRestore")?,
            unlock: act("cuCheckpointProcessUnlock")?,
            version,
            driver,
        })
    }

    /// Makes one call about the process `pid`. It may block, and a restore initialises CUDA in this process: without
    /// that, and without persistence mode, the driver refuses it and the process dies (NVIDIA/cuda-checkpoint#25).
    pub fn call(&self, pid: i32, call: &Call) -> Result<u32, DriverFailure> {
        match call {
            Call::Version => {
                u32::try_from(self.version).map_err(|_| outdated(self.version, Since::CHECKPOINT))
            }
            Call::State => self.get(self.state, "cuCheckpointProcessGetState", pid),
            Call::RestoreThread => {
                self.get(self.thread, "cuCheckpointProcessGetRestoreThreadId", pid)
            }
            Call::Lock { timeout_ms } => {
                let mut args = LockArgs {
                    timeout_ms: *timeout_ms,
                    reserved: [0; 15],
                };
                self.act(self.lock, "cuCheckpointProcessLock", pid, &mut args)
            }
            Call::Checkpoint => {
                let mut args = ReservedArgs([0; 8]);
                self.act(
                    self.checkpoint,
                    "cuCheckpointProcessCheckpoint",
                    pid,
                    &mut args,
                )
            }
            Call::Init => self.driver.init().map(|()| 0),
            Call::Restore(map) => self.restore(pid, map.as_ref()),
            Call::Unlock => {
                let mut args = ReservedArgs([0; 8]);
                self.act(self.unlock, "cuCheckpointProcessUnlock", pid, &mut args)
            }
        }
    }

    fn restore(&self, pid: i32, map: Option<&GpuMap>) -> Result<u32, DriverFailure> {
        if map.is_some() && self.version < Since::REMAP.cuda {
            return Err(outdated(self.version, Since::REMAP));
        }
        self.driver.init()?;
        let pairs = map.map_or(&[][..], GpuMap::pairs);
        let mut pairs: Vec<GpuPair> = pairs
            .iter()
            .map(|pair| GpuPair {
                old: pair.old.bytes(),
                new: pair.new.bytes(),
            })
            .collect();
        let mut args = RestoreArgs {
            pairs: match pairs.is_empty() {
                true => std::ptr::null_mut(),
                false => pairs.as_mut_ptr(),
            },
            // A machine does not have as many GPUs as would not fit.
            count: u32::try_from(pairs.len()).unwrap_or(u32::MAX),
            reserved: [0; 13],
        };
        self.act(self.restore, "cuCheckpointProcessRestore", pid, &mut args)
    }

    fn get(&self, function: Get, name: &'static str, pid: i32) -> Result<u32, DriverFailure> {
        let mut value = 0;
        // SAFETY: `value` is a valid place for the 32 bits of either answer.
        self.driver
            .check(name, unsafe { function(pid, &raw mut value) })?;
        Ok(value)
    }

    fn act<A>(
        &self,
        function: Act,
        name: &'static str,
        pid: i32,
        args: &mut A,
    ) -> Result<u32, DriverFailure> {
        // SAFETY: `args` is the 64 bytes that this function takes, zero where we know no meaning; the pairs that it may
        // point to live as long as the call.
        self.driver.check(name, unsafe {
            function(pid, std::ptr::from_mut(args).cast())
        })?;
        Ok(0)
    }
}

fn outdated(has: i32, since: Since) -> DriverFailure {
    DriverFailure::Outdated(since.lacking(has))
}
