//! A machine for one test: its own HOME, TMPDIR and PATH below one short temporary directory, programs that stand in
//! for NVIDIA's or NVIDIA's own, and the real binary. Whatever a test leaves running there is ended with it.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // Each test binary uses its part of this.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

pub const U0: &str = "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40";
pub const U1: &str = "GPU-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41";
pub const U2: &str = "GPU-2a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c42";
/// The default name of the first GPU's daemon.
pub const N0: &str = "gpu-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40";

const CONTROL: &str = "nvidia-cuda-mps-control";

/// The UUID of GPU number `index` of a sandbox.
pub fn uuid(index: usize) -> String {
    format!("GPU-{index:x}a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c4{index:x}")
}

/// The binary under test.
pub fn uni_cumps() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_uni-cumps"))
}

/// Where cargo builds, and where what is fetched for the tests lies.
pub fn target() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    Path::new(env!("CARGO_MANIFEST_DIR")).join(target.unwrap_or_else(|| "target".into()))
}

/// The example that stands in for NVIDIA's programs, built if it is not there yet.
fn stand_in() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let profile = uni_cumps().parent().expect("the binary has a directory");
        // A test binary that is called by hand finds what cargo has built before.
        if let Some(cargo) = std::env::var_os("CARGO") {
            let mut build = Command::new(cargo);
            build.args(["build", "--quiet", "--example", "demo"]);
            if profile.ends_with("release") {
                build.arg("--release");
            }
            build.current_dir(env!("CARGO_MANIFEST_DIR"));
            assert!(build.status().expect("cargo runs").success());
        }
        profile.join("examples/demo")
    })
}

#[path = "../../examples/demo/stub.rs"]
mod stub;

pub mod systemd;

/// The stand-in for libcuda.so.1, compiled once: the current one, or one that is too old.
fn libcuda(too_old: bool) -> PathBuf {
    static BUILT: [OnceLock<PathBuf>; 2] = [OnceLock::new(), OnceLock::new()];
    let (name, arguments): (&str, &[&str]) = match too_old {
        false => ("stub", &[]),
        true => ("stub-too-old", &["--cfg", "too_old"]),
    };
    let built = BUILT[usize::from(too_old)].get_or_init(|| {
        let directory = uni_cumps().parent().unwrap().join(name);
        let library = directory.join("libcuda.so.1");
        // A test binary that is called by hand takes what is there.
        if std::env::var_os("CARGO").is_some() || !library.exists() {
            fs::create_dir_all(&directory).unwrap();
            stub::compile(&library, arguments).unwrap();
        }
        library
    });
    built.clone()
}

pub struct Sandbox {
    dir: tempfile::TempDir,
}

impl Sandbox {
    /// A machine with one GPU and a stand-in control program.
    pub fn new() -> Self {
        Self::with_gpus(1)
    }

    pub fn with_gpus(count: usize) -> Self {
        let sandbox = Self::bare(count);
        symlink(stand_in(), sandbox.bin().join(CONTROL)).unwrap();
        symlink(stand_in(), sandbox.bin().join("nvidia-cuda-mps-server")).unwrap();
        sandbox
    }

    /// A machine with NVIDIA's own control program, unpacked below `directory`.
    pub fn with_real_control(directory: &Path, gpus: usize) -> Self {
        let sandbox = Self::bare(gpus);
        let program = directory.join("usr/bin").join(CONTROL);
        symlink(program, sandbox.bin().join(CONTROL)).unwrap();
        sandbox
    }

    fn bare(gpus: usize) -> Self {
        // In /tmp whatever TMPDIR says: a socket's path must be short.
        let dir = tempfile::Builder::new()
            .prefix("uc-")
            .tempdir_in("/tmp")
            .unwrap();
        let sandbox = Self { dir };
        for directory in ["bin", "h", "t", "lib", "cuda"] {
            fs::create_dir(sandbox.path(directory)).unwrap();
        }
        sandbox.libcuda(Some(false));
        set_mode(sandbox.path(""), 0o755);
        set_mode(sandbox.path("t"), 0o1777);
        // Another user's process keeps its state there as well.
        set_mode(sandbox.path("cuda"), 0o777);
        let rows: String = (0..gpus)
            .map(|index| format!("{index}, {}, Default\n", uuid(index)))
            .collect();
        sandbox.gpu_rows(&rows);
        symlink(stand_in(), sandbox.bin().join("nvidia-smi")).unwrap();
        sandbox
    }

    /// A path below the sandbox.
    pub fn path(&self, below: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(below)
    }

    pub fn bin(&self) -> PathBuf {
        self.path("bin")
    }

    /// The record directory of the default HOME.
    pub fn records(&self) -> PathBuf {
        self.path("h/.cache/unilab/cuda-mps")
    }

    pub fn record_file(&self, name: &str) -> PathBuf {
        self.records().join(name).join("daemon.json")
    }

    /// The default runtime directory.
    pub fn runtime(&self) -> PathBuf {
        self.path("t/uni-cumps")
    }

    /// What the stand-in nvidia-smi prints.
    pub fn gpu_rows(&self, rows: impl AsRef<[u8]>) {
        fs::write(self.bin().join("gpus.csv"), rows).unwrap();
    }

    /// Puts in place the stand-in for libcuda.so.1, or one that is too old, or none.
    pub fn libcuda(&self, too_old: Option<bool>) {
        let link = self.path("lib/libcuda.so.1");
        let _ = fs::remove_file(&link);
        if let Some(too_old) = too_old {
            symlink(libcuda(too_old), link).unwrap();
        }
    }

    /// Replaces a program by a shell script.
    pub fn script(&self, program: &str, body: &str) {
        self.remove_program(program);
        let path = self.bin().join(program);
        fs::write(&path, format!("#!/bin/sh\nPATH=/usr/bin:/bin\n{body}\n")).unwrap();
        set_mode(path, 0o755);
    }

    pub fn remove_program(&self, program: &str) {
        let _ = fs::remove_file(self.bin().join(program));
    }

    /// How the stand-in control program misbehaves; see `examples/demo/stand_in.rs`.
    pub fn conduct(&self, lines: &str) {
        fs::write(self.bin().join("control.conf"), lines).unwrap();
    }

    /// The calls of the stand-ins since the last time, with what changes from run to run replaced.
    pub fn calls(&self) -> String {
        let path = self.bin().join("calls");
        let calls = fs::read_to_string(&path).unwrap_or_default();
        let _ = fs::remove_file(path);
        let mut text = self.normal(&calls);
        // The marker carries our pid and a number.
        while let Some(start) = text.find("< uni-cumps-") {
            let end = text[start..]
                .find('\n')
                .map_or(text.len(), |end| start + end);
            text.replace_range(start..end, "< <marker>");
        }
        text
    }

    /// Makes a process one that uses CUDA, in this state, for the stand-in for libcuda.
    pub fn cuda_process(&self, pid: i32, state: u32) {
        fs::write(self.path(format!("cuda/{pid}")), state.to_string()).unwrap();
    }

    /// The state that the process is in by now.
    #[track_caller]
    pub fn cuda_state(&self, pid: i32) -> u32 {
        let state = fs::read_to_string(self.path(format!("cuda/{pid}"))).unwrap();
        state.trim().parse().unwrap()
    }

    /// How the stand-in for libcuda misbehaves from now on; see `examples/demo/libcuda.rs`.
    #[track_caller]
    pub fn faults(&self, lines: &str) {
        const CALLS: &str = " state thread lock checkpoint restore unlock init ";
        for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let call = line.split([':', '#', ' ']).next().unwrap_or_default();
            assert!(CALLS.contains(&format!(" {call} ")), "no such call: {line}");
        }
        fs::write(self.path("cuda/faults"), lines).unwrap();
    }

    /// The checkpoint calls and cuInits since the last time, with their pids. Faults count from here anew.
    pub fn cuda_calls(&self) -> String {
        let calls = self.cuda_calls_so_far();
        let _ = fs::remove_file(self.path("cuda/calls"));
        calls
    }

    /// Likewise, and they stay.
    pub fn cuda_calls_so_far(&self) -> String {
        let calls = fs::read_to_string(self.path("cuda/calls")).unwrap_or_default();
        self.normal(&calls)
    }

    /// `text` with the sandbox's path and the GPUs' UUIDs replaced by `<S>` and `GPU-U0` or `gpu-u0`.
    pub fn normal(&self, text: &str) -> String {
        let mut text = text.replace(self.path("").to_string_lossy().trim_end_matches('/'), "<S>");
        for index in 0..16 {
            let uuid = uuid(index);
            text = text.replace(&uuid, &format!("GPU-U{index}"));
            text = text.replace(&uuid.to_lowercase(), &format!("gpu-u{index}"));
        }
        text
    }

    /// The binary with these arguments, in an environment of nothing but HOME, TMPDIR and PATH.
    pub fn run<A: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = A>) -> Call<'_> {
        let mut argv = vec![uni_cumps().as_os_str().to_owned()];
        argv.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        Call {
            sandbox: self,
            argv,
            env: vec![
                ("HOME".into(), self.path("h").into()),
                ("TMPDIR".into(), self.path("t").into()),
                ("PATH".into(), self.bin().into()),
                ("LD_LIBRARY_PATH".into(), self.path("lib").into()),
                ("STUB_GPUS".into(), self.bin().join("gpus.csv").into()),
                ("STUB_CHECKPOINT".into(), self.path("cuda").into()),
            ],
            cwd: self.path(""),
        }
    }

    /// A shell line on a terminal, which `script` (bsdutils) gives it.
    pub fn on_a_terminal(&self, line: &str) -> Call<'_> {
        self.run([""; 0])
            .under([
                "/bin/sh",
                "-c",
                "exec /usr/bin/script -qec \"$LINE\" /dev/null",
            ])
            .env("LINE", line)
            .env("SHELL", "/bin/sh")
    }

    /// A shell line of the test's own; it must succeed.
    pub fn sh(&self, line: &str) -> String {
        let output = Command::new("/bin/sh")
            .args(["-ec", line])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("S", self.path(""))
            .env("RT", self.runtime())
            .env("REC", self.records())
            .env("N0", N0)
            .env("CONTROL", self.bin().join(CONTROL))
            .current_dir(self.path(""))
            .output()
            .unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Starts a daemon and returns its record.
    pub fn start(&self, args: &[&str]) -> Value {
        let done = self.run(["start"].iter().chain(args)).finish();
        assert_eq!(done.code, 0, "{done:?}");
        done.json()
    }

    /// Starts a control daemon without uni-cumps, in directories below the sandbox, and returns its pid.
    pub fn start_by_hand(&self, pipe: &str, log: &str) -> i32 {
        let before = self.daemons();
        self.sh(&format!(
            "mkdir -p {pipe} {log}
             # The stand-in that becomes the daemon looks for its conduct where it finds itself.
             PATH=$PATH:$S/bin CUDA_MPS_PIPE_DIRECTORY=$PWD/{pipe} CUDA_MPS_LOG_DIRECTORY=$PWD/{log} \"$CONTROL\" -d"
        ));
        let mut daemons = self.daemons();
        daemons.retain(|pid| !before.contains(pid));
        assert_eq!(daemons.len(), 1);
        daemons[0]
    }

    /// Writes a record as the Python command would.
    pub fn write_record(&self, name: &str, record: &Value) {
        let file = self.record_file(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, record.to_string()).unwrap();
    }

    /// A record as the Python command would write it for the process `pid`.
    pub fn reference_record(&self, name: &str, pid: i32) -> Value {
        let pipe = self.runtime().join(name);
        serde_json::json!({
            "created_at": 1_700_000_000.5,
            "gpu_uuids": [U0],
            "host": hostname(),
            "log_directory": pipe.join("log"),
            "name": name,
            "pid": pid,
            "pipe_directory": pipe.join("pipe"),
            "process_start_ticks": start_ticks(pid).unwrap_or(1),
            "topology_mode": "single_gpu",
            "uid": our_uid(),
        })
    }

    /// Ends a process of this sandbox with SIGKILL and waits until it is gone.
    pub fn kill(&self, pid: i32) {
        signal(pid, nix::sys::signal::Signal::SIGKILL);
        wait_until("the process is gone", || !is_running(pid));
    }

    /// The control daemons that run in this sandbox.
    pub fn daemons(&self) -> Vec<i32> {
        self.processes()
            .into_iter()
            .filter(|pid| argv0(*pid).is_some_and(|name| name.ends_with(CONTROL)))
            .collect()
    }

    /// No control daemon runs in this sandbox.
    #[track_caller]
    pub fn has_no_daemon(&self) {
        assert_eq!(self.daemons(), Vec::<i32>::new());
    }

    /// Every process whose environment names this sandbox, except shells of the test and the binary itself.
    pub fn processes(&self) -> Vec<i32> {
        let mark = self.path("");
        let mark = mark.as_os_str().as_bytes();
        let mark = mark.strip_suffix(b"/").unwrap_or(mark);
        fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|pid: &i32| {
                let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                environ.windows(mark.len()).any(|part| part == mark) && is_running(*pid)
            })
            .collect()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        for pid in self.processes() {
            signal(pid, nix::sys::signal::Signal::SIGKILL);
        }
    }
}

pub fn signal(pid: i32, signal: nix::sys::signal::Signal) {
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal);
}

/// Stops a process, as Ctrl-Z would, and waits until it stands still.
pub fn freeze(pid: i32) {
    signal(pid, nix::sys::signal::Signal::SIGSTOP);
    wait_until("the process is stopped", || is_stopped(pid));
}

pub fn is_stopped(pid: i32) -> bool {
    stat_fields(pid).is_some_and(|fields| fields[0] == "T")
}

pub fn set_mode(path: impl AsRef<Path>, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// A note past the capture of the test's output.
pub fn say(note: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{note}\n").as_bytes());
}

/// Where a program is on this machine. One that is missing is named.
pub fn installed(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).chain(["/usr/bin".into(), "/bin".into()]);
    let found = places.find_map(|directory| {
        let file = directory.join(program);
        file.is_file().then_some(file)
    });
    if found.is_none() {
        say(&format!(
            "{program} is not installed: what it would read is not tried"
        ));
    }
    found
}

/// Whether a test that must become another user, or enter a namespace, has to be left out. It is said on standard
/// error, which is not captured.
#[track_caller]
pub fn without_root() -> bool {
    let is_root = our_uid() == 0;
    if !is_root {
        let place = std::panic::Location::caller();
        say(&format!(
            "skipped, since it needs root: {}:{}",
            place.file(),
            place.line()
        ));
    }
    !is_root
}

pub fn our_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

pub fn hostname() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    name.trim().to_owned()
}

fn stat_fields(pid: i32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let tail = text.rsplit_once(") ")?.1;
    Some(tail.split(' ').map(str::to_owned).collect())
}

pub fn start_ticks(pid: i32) -> Option<u64> {
    stat_fields(pid)?.get(19)?.parse().ok()
}

/// Whether the process runs; a zombie does not.
pub fn is_running(pid: i32) -> bool {
    stat_fields(pid).is_some_and(|fields| fields[0] != "Z" && fields[0] != "X")
}

fn argv0(pid: i32) -> Option<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let name = line.split(|byte| *byte == 0).next()?;
    Some(String::from_utf8_lossy(name).into_owned())
}

/// Looks again and again until `condition` holds; a test that waits in vain fails.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A call of the binary that is being put together.
pub struct Call<'s> {
    sandbox: &'s Sandbox,
    argv: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    cwd: PathBuf,
}

/// Longer than any call of a test should take.
const CALL_LIMIT: Duration = Duration::from_secs(180);

/// The output of a program, which is killed if it takes too long: one test that hangs must not stop all others.
fn output(mut command: Command) -> Output {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let pid = child.id().try_into().unwrap();
    let (ended, end) = mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        if end.recv_timeout(CALL_LIMIT) == Err(RecvTimeoutError::Timeout) {
            signal(pid, nix::sys::signal::Signal::SIGKILL);
        }
    });
    let output = child.wait_with_output().unwrap();
    drop(ended);
    watchdog.join().unwrap();
    output
}

impl<'s> Call<'s> {
    pub fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.env.retain(|(name, _)| name != key);
        self.env.push((key.into(), value.as_ref().to_owned()));
        self
    }

    pub fn unset(mut self, key: &str) -> Self {
        self.env.retain(|(name, _)| name != key);
        self
    }

    /// One more argument.
    pub fn and(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.argv.push(argument.as_ref().to_owned());
        self
    }

    /// More arguments.
    pub fn with<A: AsRef<OsStr>>(self, arguments: impl IntoIterator<Item = A>) -> Self {
        arguments.into_iter().fold(self, Call::and)
    }

    /// Another program in the place of the binary and its arguments.
    pub fn instead<A: AsRef<OsStr>>(mut self, program: impl IntoIterator<Item = A>) -> Self {
        self.argv.clear();
        self.with(program)
    }

    pub fn cwd(mut self, directory: impl AsRef<Path>) -> Self {
        self.cwd = directory.as_ref().to_owned();
        self
    }

    /// Puts another program before the binary, such as `unshare -u`.
    pub fn under<A: AsRef<OsStr>>(mut self, wrapper: impl IntoIterator<Item = A>) -> Self {
        let wrapper = wrapper.into_iter().map(|word| word.as_ref().to_owned());
        self.argv.splice(0..0, wrapper);
        self
    }

    /// As another user. The sandbox must be readable for him.
    pub fn user(self, uid: u32) -> Self {
        self.under([
            "/usr/bin/setpriv".to_owned(),
            format!("--reuid={uid}"),
            format!("--regid={uid}"),
            "--clear-groups".to_owned(),
        ])
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.argv[0]);
        command
            .args(&self.argv[1..])
            .env_clear()
            .envs(self.env.iter().map(|(key, value)| (key, value)))
            .current_dir(&self.cwd)
            .stdin(Stdio::null());
        command
    }

    /// Starts the call and leaves it running.
    pub fn spawn(mut self) -> Child {
        // A shell that runs the tests with `&` lets them ignore SIGINT and SIGQUIT, and so would uni-cumps.
        let status = procfs::process::Process::myself().and_then(|process| process.status());
        if status.unwrap().sigign & 1 << (nix::libc::SIGINT - 1) != 0 {
            self = self.under(["/usr/bin/env", "--default-signal=INT,QUIT"]);
        }
        let mut command = self.command();
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Runs the call to its end.
    pub fn finish(self) -> Done<'s> {
        let output = output(self.command());
        Done {
            sandbox: self.sandbox,
            argv: self.argv,
            code: output
                .status
                .code()
                .unwrap_or_else(|| -output.status.signal().unwrap_or(0)),
            stdout: output.stdout,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// It exits with 0 and prints just this.
    pub fn prints(self, stdout: &str) -> Done<'s> {
        self.finish().exited(0).printed(stdout)
    }

    /// It exits with 0; what it prints is the test's own business.
    pub fn succeeds(self) -> Done<'s> {
        self.finish().exited(0)
    }

    /// It exits with 1, prints nothing, and its sentence contains this.
    pub fn fails(self, sentence: &str) -> Done<'s> {
        self.finish().exited(1).printed("").said(sentence)
    }

    /// `env` that fails: nothing but code that fails is printed.
    pub fn fails_in_the_shell(self, sentence: &str) -> Done<'s> {
        self.finish().exited(1).printed("false\n").said(sentence)
    }

    /// It is not understood: exit 2, nothing on standard output.
    pub fn breaks_usage(self) -> Done<'s> {
        self.finish().exited(2).printed("")
    }
}

/// A call that has ended.
pub struct Done<'s> {
    sandbox: &'s Sandbox,
    argv: Vec<OsString>,
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl std::fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.path(""))
    }
}

impl std::fmt::Debug for Done<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stdout = String::from_utf8_lossy(&self.stdout);
        write!(f, "{:?} exited with {}", self.argv, self.code)?;
        write!(f, "\n-- stdout\n{stdout}\n-- stderr\n{}", self.stderr)
    }
}

impl Done<'_> {
    #[track_caller]
    pub fn exited(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:#?}");
        self
    }

    /// Standard output, with the sandbox's path, UUIDs and the ages of daemons replaced.
    pub fn text(&self) -> String {
        let text = self.sandbox.normal(&String::from_utf8_lossy(&self.stdout));
        let mut parts = text.split(" age_s=");
        let mut shown = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let rest = part.trim_start_matches(|letter: char| letter.is_ascii_digit());
            shown += " age_s=";
            shown += if rest == part { "" } else { "…" };
            shown += rest;
        }
        shown
    }

    #[track_caller]
    pub fn printed(self, stdout: &str) -> Self {
        assert_eq!(self.text(), stdout, "{self:#?}");
        self
    }

    /// Standard output is this and behind it `doctor`'s lines of checks.
    #[track_caller]
    pub fn printed_before_checks(self, stdout: &str) -> Self {
        let text = self.text();
        let checks = text.find("check id=").unwrap_or(text.len());
        assert_eq!(&text[..checks], stdout, "{self:#?}");
        self
    }

    /// Standard error contains this, the sandbox's path and UUIDs replaced.
    #[track_caller]
    pub fn said(self, sentence: &str) -> Self {
        let stderr = self.sandbox.normal(&self.stderr);
        assert!(stderr.contains(sentence), "{sentence:?} in {self:#?}");
        self
    }

    /// Standard error is empty.
    #[track_caller]
    pub fn said_nothing(self) -> Self {
        assert_eq!(self.stderr, "", "{self:#?}");
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.stdout).unwrap_or_else(|error| panic!("{error} in {self:#?}"))
    }
}

/// A process that does nothing, for records that lie. It ends with the test.
pub struct Sleeper(pub Child);

impl Sleeper {
    pub fn new() -> Self {
        Self(Command::new("/bin/sleep").arg("600").spawn().unwrap())
    }

    /// One of another user, with these variables and no others.
    pub fn of(uid: u32, variables: &[(&str, &str)]) -> Self {
        let ids = [format!("--reuid={uid}"), format!("--regid={uid}")];
        let child = Command::new("/usr/bin/setpriv")
            .args(ids)
            .args(["--clear-groups", "/bin/sleep", "600"])
            .env_clear()
            .envs(variables.iter().copied())
            .spawn();
        let sleeper = Self(child.unwrap());
        wait_until("it sleeps", || {
            argv0(sleeper.pid()).is_some_and(|name| name == "/bin/sleep")
        });
        sleeper
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The pid of a record as JSON.
pub fn pid(record: &Value) -> i32 {
    i32::try_from(record["pid"].as_i64().unwrap()).unwrap()
}
