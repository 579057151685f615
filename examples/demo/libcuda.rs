//! A stand-in for libcuda.so.1, as much of it as `src/driver.rs` calls. Compiled by itself, as a `cdylib`.
//!
//! `STUB_GPUS` names a file in the form of nvidia-smi's rows; `CUDA_VISIBLE_DEVICES` is honoured for indices and
//! complete UUIDs. `STUB_CUDA` makes it misbehave: `hang` in cuInit, a number that cuInit returns, or `wrong-uuid`.
//! `STUB_CUDA_VERSION` is the version it reports. Compiled with `--cfg too_old` it is of CUDA 12.4 and lacks functions.
//!
//! The checkpoint calls play the driver's states for real processes. In the directory `STUB_CHECKPOINT` the file `PID`
//! makes a process one that uses CUDA and holds its state as a number. `PID.busy` keeps it from being locked,
//! `persistence` lets restore do without cuInit, and a restore onto other GPUs writes `PID.gpus`. Before it acts, each
//! call and cuInit append a line to `calls`. A line of `faults` makes calls fail, the first that fits:
//!
//! ```text
//! CALL[:PID][#N] WHAT      CALL: state thread lock checkpoint restore unlock init
//! ```
//!
//! `:PID` is only for this process; `#N` is only the Nth such call in `calls`, over all callers. WHAT is a number, the
//! result of a call that did nothing; `done-NUMBER`, its result although it was carried out; `hang` or `crash`, of the
//! caller, and `done-hang` or `done-crash`, after it was carried out. `slow` waits for a file `go` and is then carried
//! out. The rest answer 304: `die` kills the process, `failed` and `to-NUMBER` give it that state.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::{self, OpenOptions};
use std::io::{Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Whether cuInit has succeeded in this process.
static INITIALISED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    fn kill(pid: c_int, signal: c_int) -> c_int;
}

fn conduct() -> String {
    std::env::var("STUB_CUDA").unwrap_or_default()
}

fn version() -> c_int {
    let asked = std::env::var("STUB_CUDA_VERSION").ok();
    let own = if cfg!(too_old) { 12040 } else { 13000 };
    asked.and_then(|text| text.parse().ok()).unwrap_or(own)
}

fn hang() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

fn digits(uuid: &str) -> String {
    uuid.replace("GPU-", "").replace('-', "").to_lowercase()
}

/// The 32 digits of each device of the machine.
fn all_devices() -> Vec<String> {
    let file = std::env::var("STUB_GPUS").unwrap_or_default();
    let rows = fs::read_to_string(file).unwrap_or_default();
    rows.lines()
        .filter_map(|row| row.split(',').nth(1))
        .map(|uuid| digits(uuid.trim()))
        .filter(|digits| digits.len() == 32)
        .collect()
}

/// The 32 digits of each visible device.
fn devices() -> Vec<String> {
    let all = all_devices();
    let Ok(mask) = std::env::var("CUDA_VISIBLE_DEVICES") else {
        return all;
    };
    mask.split(',')
        .map_while(|entry| match entry.trim().parse::<usize>() {
            Ok(index) => all.get(index).cloned(),
            Err(_) => all
                .iter()
                .find(|known| **known == digits(entry.trim()))
                .cloned(),
        })
        .collect()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: u32) -> u32 {
    let variable = |name| std::env::var(name).ok();
    let pipe = variable("CUDA_MPS_PIPE_DIRECTORY");
    let words = format!(
        "mps={} empty={} mask={} job={}",
        pipe.as_deref().unwrap_or("none"),
        pipe.as_deref().is_some_and(is_private_and_empty),
        variable("CUDA_VISIBLE_DEVICES").unwrap_or("none".into()),
        variable("CUDA_CHECKPOINT_JOB_FILE").unwrap_or("none".into()),
    );
    call("init", None, &words, || {
        let code = match conduct().as_str() {
            "hang" => hang(),
            code => code
                .parse()
                .unwrap_or(if devices().is_empty() { 100 } else { 0 }),
        };
        INITIALISED.store(code == 0, Ordering::Relaxed);
        code
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    unsafe { *version = self::version() };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    unsafe { *count = devices().len() as c_int };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    unsafe { *device = ordinal };
    0
}

#[cfg(not(too_old))]
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> u32 {
    let mut digits = devices()[device as usize].clone();
    if conduct() == "wrong-uuid" {
        digits.replace_range(..2, "ff");
    }
    for (place, byte) in (0..16).enumerate() {
        let value = u8::from_str_radix(&digits[2 * byte..2 * byte + 2], 16).unwrap_or(0);
        unsafe { (*uuid)[place] = value };
    }
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    _attribute: c_int,
    _device: c_int,
) -> u32 {
    unsafe { *value = 132 };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _device: c_int) -> u32 {
    unsafe { *context = context.cast() };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(_context: *mut c_void) -> u32 {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    unsafe {
        *free = 70 << 30;
        *total = 80 << 30;
    }
    0
}

/// CUDA's name and text for a result.
fn error(code: u32) -> (&'static CStr, &'static CStr) {
    match code {
        0 => (c"CUDA_SUCCESS", c"no error"),
        1 => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        2 => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        3 => (c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
        100 => (
            c"CUDA_ERROR_NO_DEVICE",
            c"no CUDA-capable device is detected",
        ),
        201 => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        304 => (
            c"CUDA_ERROR_OPERATING_SYSTEM",
            c"OS call failed or operation not supported on this OS",
        ),
        401 => (
            c"CUDA_ERROR_ILLEGAL_STATE",
            c"the operation cannot be performed in the present state",
        ),
        600 => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
        800 => (c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted"),
        801 => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        805 => (
            c"CUDA_ERROR_MPS_CONNECTION_FAILED",
            c"MPS client failed to connect to the MPS control daemon or the MPS server",
        ),
        _ => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(code: u32, name: *mut *const c_char) -> u32 {
    unsafe { *name = error(code).0.as_ptr() };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(code: u32, text: *mut *const c_char) -> u32 {
    unsafe { *text = error(code).1.as_ptr() };
    0
}

/// The directory with the states, the log and the faults.
fn stage() -> Option<PathBuf> {
    std::env::var_os("STUB_CHECKPOINT").map(PathBuf::from)
}

fn is_private_and_empty(directory: &str) -> bool {
    let private = fs::symlink_metadata(directory)
        .is_ok_and(|found| found.is_dir() && found.permissions().mode() & 0o7777 == 0o700);
    private && fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_none())
}

/// A zombie does not run.
fn runs(pid: c_int) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").map(|(_, rest)| rest.as_bytes()[0]);
    state.is_some_and(|state| !b"ZX".contains(&state))
}

fn end(pid: c_int) {
    unsafe { kill(pid, 9) };
    while runs(pid) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn set_state(pid: c_int, state: u32) {
    write_aside(&format!("{pid}"), &state.to_string());
}

/// Written aside and renamed, so that nobody reads half of it.
fn write_aside(name: &str, text: &str) {
    let Some(stage) = stage() else { return };
    let aside = stage.join(format!(".{name}.{}", std::process::id()));
    if fs::write(&aside, text).is_ok() {
        let _ = fs::rename(aside, stage.join(name));
    }
}

/// Appends to the log and returns it up to and with this line.
fn log(stage: &Path, line: &str) -> Option<String> {
    let path = stage.join("calls");
    let mut calls = OpenOptions::new()
        .append(true)
        .create(true)
        .open(&path)
        .ok()?;
    calls.write_all(format!("{line}\n").as_bytes()).ok()?;
    let end = usize::try_from(calls.stream_position().ok()?).ok()?;
    let text = fs::read_to_string(path).ok()?;
    text.get(..end).map(str::to_owned)
}

/// What the faults say about the last call of this log.
fn fault(stage: &Path, calls: &str, name: &str, pid: Option<c_int>) -> Option<String> {
    let faults = fs::read_to_string(stage.join("faults")).ok()?;
    faults.lines().find_map(|line| {
        let (place, what) = line.trim().split_once(' ')?;
        let (place, number) = match place.split_once('#') {
            Some((place, number)) => (place, Some(number)),
            None => (place, None),
        };
        let of_one = format!("{name}:{}", pid.unwrap_or(0));
        let start = match place {
            _ if place == name => format!("{name} "),
            _ if place == of_one => format!("{name} {} ", pid.unwrap_or(0)),
            _ => return None,
        };
        let such = |line: &&str| format!("{line} ").starts_with(&start);
        let count = calls.lines().filter(such).count().to_string();
        let fits = number.is_none_or(|number| number == count);
        fits.then(|| what.trim().to_owned())
    })
}

/// One call: it is logged, and then goes as the faults say or as `act` does it.
fn call(name: &str, pid: Option<c_int>, words: &str, act: impl FnOnce() -> u32) -> u32 {
    let mut line = name.to_owned();
    for word in [pid.map(|pid| pid.to_string()), Some(words.to_owned())] {
        let word = word.filter(|word| !word.is_empty());
        line.extend(word.map(|word| format!(" {word}")));
    }
    let fault = stage().and_then(|stage| {
        let calls = log(&stage, &line)?;
        fault(&stage, &calls, name, pid)
    });
    let Some(fault) = fault else { return act() };
    if fault == "slow" {
        wait_for_go();
        return act();
    }
    let what = match fault.strip_prefix("done-") {
        Some(what) => {
            act();
            what
        }
        None => fault.as_str(),
    };
    let becomes = match what {
        "hang" => hang(),
        "crash" => std::process::abort(),
        "die" => None,
        "failed" => Some(3),
        _ => match what.strip_prefix("to-") {
            Some(state) => Some(number(state)),
            None => return number(what),
        },
    };
    match (pid, becomes) {
        (Some(pid), Some(state)) => set_state(pid, state),
        (Some(pid), None) => end(pid),
        (None, _) => {}
    }
    304
}

fn wait_for_go() {
    while stage().is_some_and(|stage| stage.exists() && !stage.join("go").exists()) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn number(text: &str) -> u32 {
    text.parse().unwrap_or_else(|_| {
        eprintln!("libcuda: the faults say {text:?}, which is nothing that can happen");
        std::process::abort()
    })
}

#[cfg(not(too_old))]
mod checkpoint {
    use super::*;

    const RUNNING: u32 = 0;
    const LOCKED: u32 = 1;
    const CHECKPOINTED: u32 = 2;

    /// `CUcheckpointLockArgs`.
    #[repr(C)]
    pub struct Lock {
        timeout_ms: u32,
        reserved: [u8; 60],
    }

    /// `CUcheckpointGpuPair`.
    #[repr(C)]
    pub struct Pair {
        old: [u8; 16],
        new: [u8; 16],
    }

    /// `CUcheckpointRestoreArgs` of CUDA 13.0.
    #[repr(C)]
    pub struct Restore {
        pairs: *const Pair,
        count: u32,
        reserved: [u8; 52],
    }

    /// The arguments of checkpoint and unlock: nothing but reserved bytes.
    type Reserved = [u8; 64];

    const _: () = assert!(size_of::<Lock>() == 64 && size_of::<Restore>() == 64);

    /// The state of a process that runs and uses CUDA.
    fn state(pid: c_int) -> Option<u32> {
        let text = fs::read_to_string(stage()?.join(pid.to_string())).ok()?;
        text.trim().parse().ok().filter(|_| runs(pid))
    }

    /// From one state into another, for a process that uses CUDA.
    fn step(pid: c_int, from: u32, to: u32) -> u32 {
        match state(pid) {
            None => 1,
            Some(state) if state != from => 401,
            Some(_) => {
                set_state(pid, to);
                0
            }
        }
    }

    fn is_zero(bytes: &[u8]) -> bool {
        bytes.iter().all(|byte| *byte == 0)
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn cuCheckpointProcessGetState(pid: c_int, out: *mut u32) -> u32 {
        call("state", Some(pid), "", || match state(pid) {
            Some(state) => {
                unsafe { *out = state };
                0
            }
            None => 1,
        })
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn cuCheckpointProcessGetRestoreThreadId(pid: c_int, out: *mut c_int) -> u32 {
        call("thread", Some(pid), "", || match state(pid) {
            Some(_) => {
                unsafe { *out = pid + 1 };
                0
            }
            None => 1,
        })
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn cuCheckpointProcessLock(pid: c_int, args: *const Lock) -> u32 {
        let args = unsafe { args.as_ref() };
        let timeout = args.map_or(0, |args| args.timeout_ms);
        call("lock", Some(pid), &format!("timeout={timeout}"), || {
            if args.is_some_and(|args| !is_zero(&args.reserved)) {
                return 1;
            }
            let busy = stage().map(|stage| stage.join(format!("{pid}.busy")));
            let busy = || busy.as_ref().is_some_and(|file| file.exists());
            if state(pid) == Some(RUNNING) && busy() && timeout > 0 {
                return 600;
            }
            // Without a time limit the driver waits.
            while state(pid) == Some(RUNNING) && busy() {
                std::thread::sleep(Duration::from_millis(5));
            }
            step(pid, RUNNING, LOCKED)
        })
    }

    /// A step that takes nothing.
    fn plain(name: &str, pid: c_int, args: *const Reserved, from: u32, to: u32) -> u32 {
        let args = unsafe { args.as_ref() };
        call(name, Some(pid), "", || match args {
            Some(args) if !is_zero(args) => 1,
            _ => step(pid, from, to),
        })
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn cuCheckpointProcessCheckpoint(pid: c_int, args: *const Reserved) -> u32 {
        plain("checkpoint", pid, args, LOCKED, CHECKPOINTED)
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn cuCheckpointProcessUnlock(pid: c_int, args: *const Reserved) -> u32 {
        plain("unlock", pid, args, LOCKED, RUNNING)
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn cuCheckpointProcessRestore(pid: c_int, args: *const Restore) -> u32 {
        let args = unsafe { args.as_ref() };
        let pairs = args.map_or(&[][..], |args| args.pairs());
        let words: Vec<String> = pairs.iter().map(Pair::text).collect();
        call("restore", Some(pid), &words.join(" "), || {
            if args.is_some_and(|args| !args.are_valid()) {
                return 1;
            }
            match state(pid) {
                None => return 1,
                Some(CHECKPOINTED) => {}
                Some(_) => return 401,
            }
            let persistent = stage().is_some_and(|stage| stage.join("persistence").exists());
            if !persistent && !INITIALISED.load(Ordering::Relaxed) {
                end(pid);
                return 800;
            }
            if !pairs.is_empty() {
                // The real driver counts every GPU of the machine, whatever the mask.
                if std::env::var_os("CUDA_VISIBLE_DEVICES").is_some() || !name_every_gpu(pairs) {
                    return 1;
                }
                write_aside(&format!("{pid}.gpus"), &format!("{}\n", words.join("\n")));
            }
            step(pid, CHECKPOINTED, LOCKED)
        })
    }

    impl Restore {
        fn pairs(&self) -> &[Pair] {
            match self.pairs.is_null() || self.count > 1024 {
                true => &[],
                false => unsafe { std::slice::from_raw_parts(self.pairs, self.count as usize) },
            }
        }

        /// Before CUDA 13.0 every byte was reserved.
        fn are_valid(&self) -> bool {
            let none = self.pairs.is_null() && self.count == 0;
            let some = !self.pairs().is_empty() && version() >= 13000;
            is_zero(&self.reserved) && (none || some)
        }
    }

    impl Pair {
        fn text(&self) -> String {
            format!("{}={}", dashed(&self.old), dashed(&self.new))
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn dashed(uuid: &[u8; 16]) -> String {
        let parts = [0..4, 4..6, 6..8, 8..10, 10..16];
        let parts = parts.map(|part| hex(&uuid[part]));
        format!("GPU-{}", parts.join("-"))
    }

    /// Each GPU stands once on either side.
    fn name_every_gpu(pairs: &[Pair]) -> bool {
        let sorted = |mut uuids: Vec<String>| {
            uuids.sort();
            uuids
        };
        let all = sorted(all_devices());
        all == sorted(pairs.iter().map(|pair| hex(&pair.old)).collect())
            && all == sorted(pairs.iter().map(|pair| hex(&pair.new)).collect())
    }
}
