//! `start`: which GPU is meant, which name, who is in the way, and what becomes of a daemon that will not start.

use std::fs;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::process::Child;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::{N0, Sandbox, Sleeper, U0, U1, is_running, our_uid, pid, signal, wait_until};

/// Nothing was started, and nothing was written to HOME or TMPDIR.
#[track_caller]
fn is_untouched(machine: &Sandbox) {
    machine.has_no_daemon();
    for directory in ["h", "t"] {
        let entries: Vec<_> = fs::read_dir(machine.path(directory)).unwrap().collect();
        assert!(entries.is_empty(), "{directory}: {entries:?}");
    }
}

/// Neither a daemon nor a word of it is left.
#[track_caller]
fn left_nothing(machine: &Sandbox) {
    machine.has_no_daemon();
    assert_eq!(recorded(machine), Vec::<String>::new());
}

/// The names in the record directory.
fn recorded(machine: &Sandbox) -> Vec<String> {
    names_in(machine.records())
        .into_iter()
        .filter(|name| !name.starts_with('.'))
        .collect()
}

/// The directories of stale records that were put aside.
fn put_aside(machine: &Sandbox) -> Vec<PathBuf> {
    let stale = machine.records().join(".stale");
    names_in(stale.clone())
        .into_iter()
        .map(|name| stale.join(name))
        .collect()
}

fn names_in(directory: PathBuf) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn read_json(path: impl AsRef<std::path::Path>) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The variables that a process was started with.
fn environment_of(pid: i32) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/environ")).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let mut variables: Vec<String> = text.split_terminator('\0').map(str::to_owned).collect();
    variables.sort();
    variables
}

fn pid_of(child: &Child) -> i32 {
    i32::try_from(child.id()).unwrap()
}

/// Waits for the end of a call in the background; its exit status, standard output and standard error.
fn end_of(mut child: Child) -> (i32, String, String) {
    let mut texts = [String::new(), String::new()];
    let status = child.wait().unwrap();
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut texts[0])
        .unwrap();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut texts[1])
        .unwrap();
    let [stdout, stderr] = texts;
    (status.code().unwrap_or(-1), stdout, stderr)
}

fn wait_for_call(machine: &Sandbox, call: &str) {
    wait_until(call, || {
        let calls = fs::read_to_string(machine.bin().join("calls")).unwrap_or_default();
        calls.contains(call)
    });
}

/// Starts a control daemon by hand, as somebody without uni-cumps would, and returns its pid.
fn start_by_hand(machine: &Sandbox, pipe: &str, gpu: &str) -> i32 {
    machine.sh(&format!(
        "mkdir -p -m 700 {pipe} hand; CUDA_MPS_PIPE_DIRECTORY=$S/{pipe} CUDA_MPS_LOG_DIRECTORY=$S/hand \
         CUDA_VISIBLE_DEVICES={gpu} \"$CONTROL\" -d"
    ));
    let daemons = machine.daemons();
    assert_eq!(daemons.len(), 1);
    daemons[0]
}

/// The names in a directory, with the modification time of each: what changes when something there is touched.
fn state_of(directory: PathBuf) -> Vec<(String, std::time::SystemTime)> {
    names_in(directory.clone())
        .into_iter()
        .map(|name| {
            let meta = fs::symlink_metadata(directory.join(&name)).unwrap();
            (name, meta.modified().unwrap())
        })
        .collect()
}

#[test]
fn start_default() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    assert_eq!(machine.daemons(), [pid(&record)]);
    assert_eq!(
        machine.calls(),
        "nvidia-smi --query-gpu=index,uuid,compute_mode,mig.mode.current --format=csv,noheader
nvidia-cuda-mps-control -d
    CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log
    CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe
    CUDA_MPS_PROTOCOL_VERSION=2
    CUDA_VISIBLE_DEVICES=GPU-U0
nvidia-cuda-mps-control
    CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log
    CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe
    CUDA_MPS_PROTOCOL_VERSION=2
    < get_server_list
    < <marker>
"
    );
    assert!(machine.record_file(N0).exists());
    let pid = pid(&record);
    machine.run(["status"]).prints(&format!(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
daemon name=gpu-u0 state=live pid={pid} mode=single_gpu gpus=GPU-U0 servers=0 clients=0 age_s=…
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
"
    ));
    machine.run(["env"]).prints(
        "export CUDA_VISIBLE_DEVICES=GPU-U0
export CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe
export CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log
",
    );
    let stopped = machine.run(["stop"]).succeeds().said_nothing().json();
    assert_eq!(stopped, json!({"stopped": [record]}));
    machine.has_no_daemon();
    machine.run(["status"]).prints(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
managed_daemons=none
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
",
    );
}

#[test]
fn start_daemon_flag() {
    let machine = Sandbox::new();
    let record = machine.start(&["--daemon"]);
    assert_eq!(machine.daemons(), [pid(&record)]);
}

// Which GPU.

#[test]
fn start_2gpu_ambiguous() {
    let machine = Sandbox::with_gpus(2);
    machine
        .run(["start"])
        .fails("2 GPUs are visible and one must be chosen")
        .said("visible are index 0 (GPU-U0), index 1 (GPU-U1)")
        .said("hint: --gpus 0");
    is_untouched(&machine);
}

#[test]
fn start_by_index() {
    let machine = Sandbox::with_gpus(2);
    for selector in ["1", " 1 ", "01", "1,", ",1"] {
        let record = machine.start(&["--gpus", selector]);
        assert_eq!(record["gpu_uuids"], json!([U1]), "{selector:?}");
        machine.run(["stop"]).succeeds();
    }
    machine.has_no_daemon();
}

#[test]
fn start_by_uuid() {
    let machine = Sandbox::with_gpus(2);
    let bare = &U1[4..];
    let selectors = [
        U1.to_owned(),
        U1.to_uppercase(),
        bare.to_owned(),
        bare.to_uppercase(),
        format!("GPU-{}", bare.replace('-', "")),
        format!("gpu-{bare}"),
        format!("  {U1} "),
    ];
    for selector in &selectors {
        let record = machine.start(&["--gpus", selector]);
        assert_eq!(record["gpu_uuids"], json!([U1]), "{selector:?}");
        machine.run(["stop"]).succeeds();
    }
    machine.has_no_daemon();
}

#[test]
fn start_bad_selector() {
    let machine = Sandbox::with_gpus(2);
    let twice = format!("1,{U0},0");
    let undashed = U0[4..].replace('-', "");
    let too_long = format!("{U0}0");
    let mig = U0.replace("GPU-", "MIG-");
    for (selector, sentence) in [
        (undashed.as_str(), "is not a GPU UUID"),
        ("GPU-0a1b2c3d", "matches no GPU of this machine"),
        (&too_long, "matches no GPU of this machine"),
        ("GPU-", "\"GPU-\" is not a GPU UUID"),
        ("gpu-", "\"gpu-\" is not a GPU UUID"),
        ("GPU-zz", "\"GPU-zz\" matches no GPU of this machine"),
        ("bad", "\"bad\" is not a GPU UUID"),
        (&mig, "matches no MIG instance of this machine"),
        ("mig-x", "\"mig-x\" is not a GPU UUID"),
        ("", "the GPU selector is empty"),
        (" ", "the GPU selector is empty"),
        (",", "the GPU selector is empty"),
        ("ALL", "\"ALL\" is not a GPU UUID"),
        ("0,0", "GPU index 0 (GPU-U0) is named twice"),
        (&twice, "GPU index 0 (GPU-U0) is named twice"),
        ("9", "\"9\" matches no GPU of this machine"),
        ("-1", "\"-1\" is not a GPU UUID"),
        ("1.0", "\"1.0\" is not a GPU UUID"),
        ("0x1", "\"0x1\" is not a GPU UUID"),
        ("+1", "\"+1\" is not a GPU UUID"),
    ] {
        machine.run(["start", "--gpus", selector]).fails(sentence);
    }
    is_untouched(&machine);
}

#[test]
fn start_uuid_abbreviated() {
    let machine = Sandbox::with_gpus(2);
    machine
        .run(["start", "--gpus", "GPU-0a1b"])
        .fails("matches no GPU of this machine")
        .said("a UUID must be complete here; index 0 (GPU-U0) begins like it")
        .said("hint: --gpus GPU-U0");
    is_untouched(&machine);
}

#[test]
fn start_unicode_digit() {
    let machine = Sandbox::with_gpus(2);
    for digit in ["²", "١"] {
        let sentence = format!("{digit:?} is not a GPU UUID");
        machine.run(["start", "--gpus", digit]).fails(&sentence);
    }
    is_untouched(&machine);
}

#[test]
fn start_no_gpu() {
    let machine = Sandbox::with_gpus(0);
    for command in ["start", "doctor"] {
        machine
            .run([command])
            .fails("no usable NVIDIA GPU was found")
            .said("nvidia-smi succeeded but listed no GPU");
    }
    for (body, said) in [
        (
            "echo 'driver not loaded' >&2; exit 9",
            "exited with status 9: driver not loaded",
        ),
        (
            "echo 'No devices were found'; exit 6",
            "exited with status 6: No devices were found",
        ),
    ] {
        machine.script("nvidia-smi", body);
        for command in ["start", "doctor"] {
            machine
                .run([command])
                .fails("nvidia-smi could not list the GPUs")
                .said(said);
        }
    }
    machine.remove_program("nvidia-smi");
    for command in ["start", "doctor"] {
        machine
            .run([command])
            .fails("nvidia-smi could not list the GPUs")
            .said("nvidia-smi is not on PATH");
    }
    is_untouched(&machine);
}

#[test]
fn start_cvd_ignored() {
    let machine = Sandbox::with_gpus(2);
    let start = || machine.run(["start"]);
    for mask in ["1", U1, "GPU-1a1b", "1,1", "1,bad,0"] {
        let record = start().env("CUDA_VISIBLE_DEVICES", mask).succeeds().json();
        assert_eq!(record["gpu_uuids"], json!([U1]), "{mask}");
        machine.run(["stop"]).succeeds();
    }
    for mask in ["-1", ""] {
        start()
            .env("CUDA_VISIBLE_DEVICES", mask)
            .fails("leaves no GPU visible")
            .said("unset CUDA_VISIBLE_DEVICES");
    }
    machine.has_no_daemon();
    let record = machine
        .run(["start", "--gpus", "0"])
        .env("CUDA_VISIBLE_DEVICES", "1")
        .succeeds()
        .said("CUDA_VISIBLE_DEVICES=\"1\" hides GPU index 0 (GPU-U0); --gpus goes before it")
        .json();
    assert_eq!(record["gpu_uuids"], json!([U0]));
}

#[test]
fn start_cvd_1gpu() {
    let machine = Sandbox::new();
    for mask in ["", "-1", "bad"] {
        machine
            .run(["start"])
            .env("CUDA_VISIBLE_DEVICES", mask)
            .fails("leaves no GPU visible");
    }
    is_untouched(&machine);
    machine
        .run(["start", "--gpus", "0"])
        .env("CUDA_VISIBLE_DEVICES", "")
        .succeeds()
        .said("hides GPU index 0");
}

#[test]
fn start_compute_mode() {
    let machine = Sandbox::new();
    machine.gpu_rows(format!("0, {U0}, Prohibited\n"));
    machine
        .run(["start"])
        .succeeds()
        .said("GPU index 0 (GPU-U0) has compute mode Prohibited and takes no program")
        .said("sudo nvidia-smi -i 0 -c DEFAULT");
    assert_eq!(machine.daemons().len(), 1);
}

#[test]
fn a_gpu_that_is_lost_is_refused_and_the_other_one_starts() {
    let machine = Sandbox::with_gpus(2);
    machine.gpu_rows(format!("0, {U0}, Default\n1, [GPU is lost], Default\n"));
    machine
        .run(["start", "--gpus", "1"])
        .fails("GPU index 1 is not usable")
        .said("[GPU is lost]");
    let record = machine.start(&["--gpus", "0"]);
    assert_eq!(record["gpu_uuids"], json!([U0]));
}

#[test]
fn start_same_gpu_twice() {
    let machine = Sandbox::new();
    let first = machine.start(&["--name", "a"]);
    let first = pid(&first);
    machine
        .run(["start", "--name", "b"])
        .fails(&format!(
            "daemon a (pid {first}) already serves GPU index 0 (GPU-U0)"
        ))
        .said("uni-cumps stop --name a");
    assert_eq!(machine.daemons(), [first]);
    assert_eq!(recorded(&machine), ["a"]);
    let env = machine.run(["env"]).succeeds().text();
    assert!(env.contains("<S>/t/uni-cumps/a/pipe"), "{env}");
}

// Which name.

#[test]
fn start_name_valid() {
    let machine = Sandbox::new();
    let longest = "x".repeat(64);
    let (pipe, log) = (machine.path("p"), machine.path("l"));
    for name in ["a", "a-b-", "0", &longest] {
        let record = machine.start(&[
            "--name",
            name,
            "--pipe-dir",
            pipe.to_str().unwrap(),
            "--log-dir",
            log.to_str().unwrap(),
        ]);
        assert_eq!(record["name"], name);
        assert_eq!(recorded(&machine), [name]);
        machine.run(["stop", "--name", name]).succeeds();
    }
    left_nothing(&machine);
}

#[test]
fn start_name_invalid() {
    let machine = Sandbox::new();
    let too_long = "x".repeat(65);
    for name in [
        "A", "-x", "a_b", "a/b", "../x", &too_long, "a\n", ".stale", "é", " a", "a.b",
    ] {
        machine
            .run(["start", &format!("--name={name}")])
            .fails(&format!("{name:?} is not a daemon name"))
            .said("a name is 1 to 64 of a-z, 0-9 and -");
    }
    is_untouched(&machine);
    assert_eq!(machine.start(&["--name", ""])["name"], N0);
}

// Who is there already.

#[test]
fn start_already_live() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    let sentence = format!("daemon gpu-u0 is already live with pid {}", pid(&record));
    machine.run(["start"]).fails(&sentence);
    machine
        .run(["start", "--gpus", U0, "--name", N0])
        .fails(&sentence);
    assert_eq!(machine.daemons(), [pid(&record)]);
    assert_eq!(read_json(machine.record_file(N0)), record);
}

#[test]
fn start_kill9_default() {
    let machine = Sandbox::new();
    let old = machine.start(&[]);
    machine.kill(pid(&old));
    let new = machine.start(&[]);
    assert_eq!(machine.daemons(), [pid(&new)]);
    assert_eq!(read_json(machine.record_file(N0)), new);
    let [stale] = put_aside(&machine).try_into().unwrap();
    let name = stale.file_name().unwrap().to_str().unwrap();
    let milliseconds = name.strip_prefix(&format!("{N0}-")).unwrap();
    assert!(milliseconds.parse::<u64>().is_ok(), "{name}");
    assert_eq!(read_json(stale.join("daemon.json")), old);
}

#[test]
fn start_kill9_explicit() {
    let machine = Sandbox::new();
    let (pipe, log) = (machine.path("p"), machine.path("l"));
    let args = [
        "--name",
        "a",
        "--pipe-dir",
        pipe.to_str().unwrap(),
        "--log-dir",
        log.to_str().unwrap(),
    ];
    let old = machine.start(&args);
    machine.kill(pid(&old));
    let new = machine.start(&args);
    assert_eq!(machine.daemons(), [pid(&new)]);
    assert_eq!(put_aside(&machine).len(), 1);
    machine.run(["stop", "--name", "a"]).succeeds();
    left_nothing(&machine);
}

#[test]
fn start_stale_many() {
    let machine = Sandbox::new();
    for _ in 0..3 {
        let record = machine.start(&[]);
        machine.kill(pid(&record));
    }
    assert_eq!(put_aside(&machine).len(), 2);
    machine.has_no_daemon();
}

#[test]
fn a_damaged_record_is_put_aside() {
    let machine = Sandbox::new();
    let file = machine.record_file(N0);
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, "{").unwrap();
    let record = machine.start(&[]);
    assert_eq!(read_json(file), record);
    let [stale] = put_aside(&machine).try_into().unwrap();
    assert_eq!(fs::read(stale.join("daemon.json")).unwrap(), b"{");
}

#[test]
fn a_process_that_got_the_pid_of_a_daemon_that_is_gone_is_left_alone() {
    let machine = Sandbox::new();
    let other = Sleeper::new();
    let mut record = machine.reference_record(N0, other.pid());
    record["process_start_ticks"] = json!(1);
    machine.write_record(N0, &record);
    let started = machine.start(&[]);
    assert_eq!(machine.daemons(), [pid(&started)]);
    assert!(is_running(other.pid()));
}

#[test]
fn a_daemon_that_cannot_be_reached_is_not_replaced() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine.sh("rm $RT/$N0/pipe/control");
    machine
        .run(["start"])
        .fails("is alive, but its control socket is not reachable")
        .said("uni-cumps stop --name gpu-u0");
    assert_eq!(machine.daemons(), [pid(&record)]);
    assert_eq!(read_json(machine.record_file(N0)), record);
}

#[test]
fn start_foreign_daemon() {
    let machine = Sandbox::new();
    let daemon = start_by_hand(&machine, "p", U0);
    let before = state_of(machine.path("p"));
    machine
        .run(["start", "--name", "a", "--pipe-dir"])
        .and(machine.path("p"))
        .and("--log-dir")
        .and(machine.path("l2"))
        .fails("another control daemon already uses the pipe directory \"<S>/p\"")
        .said(&format!("pid {daemon} of uid {} runs there", our_uid()));
    assert_eq!(state_of(machine.path("p")), before);
    assert!(!machine.path("l2").exists());
    assert_eq!(machine.daemons(), [daemon]);
    assert_eq!(recorded(&machine), Vec::<String>::new());
    let second = machine.sh(
        "if CUDA_MPS_PIPE_DIRECTORY=$S/p CUDA_MPS_LOG_DIRECTORY=$S/hand \"$CONTROL\" -d; then exit 1; fi",
    );
    assert_eq!(second, "An instance of this daemon is already running\n");
}

#[test]
fn a_daemon_in_a_given_directory_is_nobodys_to_adopt() {
    let machine = Sandbox::new();
    let daemon = start_by_hand(&machine, "p", U0);
    // The log directory is the default one, the pipe directory is not.
    machine
        .run(["start", "--pipe-dir"])
        .and(machine.path("p"))
        .fails("another control daemon already uses the pipe directory \"<S>/p\"");
    assert_eq!(machine.daemons(), [daemon]);
    assert_eq!(recorded(&machine), Vec::<String>::new());
}

#[test]
fn start_over_managed_pipe() {
    let machine = Sandbox::with_gpus(2);
    let record = machine.start(&["--gpus", "0", "--name", "a"]);
    let pipe = machine.runtime().join("a/pipe");
    let before = state_of(pipe.clone());
    for (gpu, sentence) in [
        ("0", "daemon a (pid "),
        (
            "1",
            "another control daemon already uses the pipe directory \"<S>/t/uni-cumps/a/pipe\"",
        ),
    ] {
        machine
            .run(["start", "--gpus", gpu, "--name", "b", "--pipe-dir"])
            .and(&pipe)
            .and("--log-dir")
            .and(machine.path("l2"))
            .fails(sentence);
    }
    assert_eq!(state_of(pipe), before);
    assert_eq!(machine.daemons(), [pid(&record)]);
    assert_eq!(recorded(&machine), ["a"]);
    machine.run(["stop"]).succeeds();
    machine.has_no_daemon();
}

#[test]
fn start_foreign_regular_file() {
    let machine = Sandbox::new();
    let start = || {
        machine
            .run(["start", "--name", "a", "--pipe-dir"])
            .and(machine.path("p"))
            .and("--log-dir")
            .and(machine.path("l"))
    };
    machine.sh("mkdir -m 700 p; echo x > p/control");
    start().fails("\"<S>/p/control\" is in the way: it is a regular file, not a socket");
    assert_eq!(machine.sh("cat p/control"), "x\n");
    machine.sh("rm p/control; mkdir p/control");
    start().fails("\"<S>/p/control\" is in the way: it is a directory, not a socket");
    left_nothing(&machine);
    machine.sh("rmdir p/control; ln -s $S/elsewhere p/control");
    start().succeeds();
    let control = fs::symlink_metadata(machine.path("p/control")).unwrap();
    assert!(control.file_type().is_socket());
    assert!(!machine.path("elsewhere").exists());
}

#[test]
fn start_lost_record_550() {
    let machine = Sandbox::new();
    let lost = machine.start(&[]);
    let lost = pid(&lost);
    machine.sh("rm -rf h/.cache");
    machine
        .run(["env"])
        .fails_in_the_shell("no recorded daemon is live");
    machine
        .run(["stop", "--name", N0])
        .fails("no daemon named gpu-u0 is recorded");
    let found = machine
        .run(["start"])
        .succeeds()
        .said(&format!("pid {lost} ran already in"))
        .said("it is recorded again")
        .json();
    assert_eq!(pid(&found), lost);
    assert_eq!(machine.daemons(), [lost]);
    assert_eq!(read_json(machine.record_file(N0)), found);
    machine.run(["stop"]).succeeds();
    left_nothing(&machine);
}

#[test]
fn the_daemon_of_another_gpu_is_not_adopted() {
    let machine = Sandbox::with_gpus(2);
    let lost = machine.start(&["--gpus", "0", "--name", "a"]);
    machine.sh("rm -rf h/.cache");
    machine
        .run(["start", "--gpus", "1", "--name", "a"])
        .fails("another control daemon already uses the pipe directory");
    assert_eq!(machine.daemons(), [pid(&lost)]);
    assert_eq!(recorded(&machine), Vec::<String>::new());
}

// Driver 535.

#[test]
fn start_535() {
    let machine = Sandbox::new();
    machine.conduct("pid-file no");
    let record = machine.start(&[]);
    assert_eq!(machine.daemons(), [pid(&record)]);
    let pid_file = machine
        .runtime()
        .join(N0)
        .join("pipe/nvidia-cuda-mps-control.pid");
    assert!(!pid_file.exists());
    let status = machine.run(["status"]).succeeds().text();
    assert!(status.contains("daemon name=gpu-u0 state=live"), "{status}");
    machine.run(["env"]).succeeds();
    machine.run(["stop"]).succeeds();
    left_nothing(&machine);
}

#[test]
fn start_535_retry_leaks() {
    let machine = Sandbox::new();
    machine.conduct("pid-file no");
    let record = machine.start(&[]);
    for _ in 0..2 {
        machine.run(["start"]).fails("is already live with pid");
    }
    assert_eq!(machine.daemons(), [pid(&record)]);
    machine.run(["env"]).succeeds();
}

#[test]
fn start_535_explicit() {
    let machine = Sandbox::new();
    machine.conduct("pid-file no");
    let start = || {
        machine
            .run(["start", "--name", "a", "--pipe-dir"])
            .and(machine.path("p"))
            .and("--log-dir")
            .and(machine.path("l"))
    };
    let record = start().succeeds().json();
    start().fails("daemon a is already live with pid");
    assert_eq!(machine.daemons(), [pid(&record)]);
    machine.run(["stop"]).succeeds();
    left_nothing(&machine);
}

#[test]
fn start_pidfile_not_truncated() {
    let machine = Sandbox::new();
    let pid_file = "$RT/$N0/pipe/nvidia-cuda-mps-control.pid";
    machine.sh(&format!(
        "mkdir -p -m 700 $RT/$N0/pipe; printf 4194304999 > {pid_file}"
    ));
    let record = machine.start(&[]);
    assert_eq!(machine.daemons(), [pid(&record)]);
    let garbled = machine.sh(&format!("cat {pid_file}"));
    assert_ne!(garbled, pid(&record).to_string());
    machine.run(["stop"]).succeeds();
    left_nothing(&machine);
}

// What the daemon gets.

#[test]
fn start_env_override() {
    let machine = Sandbox::new();
    let call = |command: &str| {
        machine
            .run([command])
            .env("CUDA_MPS_PIPE_DIRECTORY", machine.path("ep"))
            .env("CUDA_MPS_LOG_DIRECTORY", machine.path("el"))
            .env("CUDA_VISIBLE_DEVICES", "0")
    };
    let record = call("start")
        .succeeds()
        .said("CUDA_MPS_PIPE_DIRECTORY=\"<S>/ep\" of your environment is not passed to the daemon")
        .said("CUDA_MPS_LOG_DIRECTORY=\"<S>/el\" of your environment is not passed to the daemon")
        .json();
    let cuda: Vec<String> = environment_of(pid(&record))
        .into_iter()
        .filter(|variable| variable.starts_with("CUDA_"))
        .map(|variable| machine.normal(&variable))
        .collect();
    assert_eq!(
        cuda,
        [
            "CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log",
            "CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe",
            "CUDA_MPS_PROTOCOL_VERSION=2",
            "CUDA_VISIBLE_DEVICES=GPU-U0",
        ]
    );
    call("env").prints(
        "export CUDA_VISIBLE_DEVICES=GPU-U0
export CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe
export CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log
",
    );
    call("stop").succeeds();
    left_nothing(&machine);
    assert!(!machine.path("ep").exists() && !machine.path("el").exists());
}

#[test]
fn daemon_inherits_cwd() {
    let machine = Sandbox::new();
    let job = machine.path("job");
    fs::create_dir(&job).unwrap();
    let record = machine
        .run(["start"])
        .cwd(&job)
        .env("MY_SECRET_TOKEN", "hunter2")
        .env("LANG", "C.UTF-8")
        .succeeds()
        .json();
    let pid = pid(&record);
    let cwd = fs::read_link(format!("/proc/{pid}/cwd")).unwrap();
    assert_eq!(cwd, PathBuf::from("/"));
    let environment = environment_of(pid);
    assert!(environment.contains(&"LANG=C.UTF-8".to_owned()));
    let secret = environment.iter().find(|entry| entry.contains("hunter2"));
    assert_eq!(secret, None);
}

// A daemon that will not start.

#[test]
fn start_no_control_binary() {
    let machine = Sandbox::new();
    let gone = machine.reference_record("a", 1_000_000_000);
    machine.write_record("a", &gone);
    machine.remove_program("nvidia-cuda-mps-control");
    machine
        .run(["start", "--name", "a"])
        .fails("nvidia-cuda-mps-control is not on PATH");
    assert_eq!(read_json(machine.record_file("a")), gone);
    assert_eq!(put_aside(&machine), Vec::<PathBuf>::new());
    assert!(!machine.runtime().exists());
}

#[test]
fn start_control_fails() {
    let machine = Sandbox::new();
    machine.conduct("launch fail no privilege");
    machine
        .run(["start"])
        .fails("nvidia-cuda-mps-control did not start the daemon")
        .said("it exited with status 1: no privilege");
    machine.sh("echo 'old line' >> $RT/$N0/log/control.log");
    let again = machine.run(["start"]).fails("did not start the daemon");
    assert!(!again.stderr.contains("old line"), "{again:?}");
    left_nothing(&machine);
    assert_eq!(names_in(machine.runtime().join(N0)), ["log"]);
}

#[test]
fn start_control_no_pipe() {
    let machine = Sandbox::new();
    machine.conduct("launch leave-child");
    machine
        .run(["start"])
        .fails("did not become ready within 10 s")
        .said("Cannot find MPS control daemon process");
    left_nothing(&machine);
    // Nor the child that the launch left behind.
    assert_eq!(machine.processes(), Vec::<i32>::new());
}

#[test]
fn start_control_hangs() {
    let machine = Sandbox::new();
    machine.conduct("answers never");
    machine
        .run(["start"])
        .fails("the control daemon in \"<S>/t/uni-cumps/gpu-u0/pipe\" did not become ready")
        .said("control.log says:\nStarting control daemon");
    left_nothing(&machine);
    let status = machine.run(["status"]).succeeds().text();
    assert!(status.contains("managed_daemons=none"), "{status}");
}

#[test]
fn start_interrupted() {
    for (number, status) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let machine = Sandbox::new();
        machine.conduct("answers never");
        let start = machine.run(["start"]).spawn();
        wait_for_call(&machine, "get_server_list");
        signal(pid_of(&start), number);
        let (code, stdout, stderr) = end_of(start);
        assert_eq!((code, stdout.as_str()), (status, ""), "{stderr}");
        assert!(stderr.contains("error: interrupted by signal"), "{stderr}");
        left_nothing(&machine);
    }
}

#[test]
fn a_start_that_is_interrupted_during_the_launch_leaves_nothing() {
    let machine = Sandbox::new();
    machine.conduct("launch hang");
    let start = machine.run(["start"]).spawn();
    wait_for_call(&machine, "nvidia-cuda-mps-control -d");
    signal(pid_of(&start), Signal::SIGINT);
    let (code, stdout, stderr) = end_of(start);
    assert_eq!((code, stdout.as_str()), (130, ""), "{stderr}");
    left_nothing(&machine);
}

#[test]
fn what_a_killed_start_left_behind_is_ended_by_stop() {
    let machine = Sandbox::new();
    machine.conduct("answers never");
    let mut start = machine.run(["start"]).spawn();
    wait_for_call(&machine, "get_server_list");
    start.kill().unwrap();
    start.wait().unwrap();
    machine.conduct("");
    let status = machine.run(["status"]).succeeds().text();
    assert!(
        status.contains("record name=gpu-u0 state=interrupted"),
        "{status}"
    );
    // It says nothing, so it can only be ended.
    machine.run(["stop", "--name", N0]).succeeds();
    // The killed start's question ends with the daemon.
    wait_until("both are gone", || machine.daemons().is_empty());
    left_nothing(&machine);
}

#[test]
fn what_a_killed_start_left_behind_is_taken_over_by_the_next() {
    for explicit in [false, true] {
        let machine = Sandbox::new();
        let start = || {
            let call = machine.run(["start", "--name", "a"]);
            if !explicit {
                return call;
            }
            call.and("--pipe-dir")
                .and(machine.path("p"))
                .and("--log-dir")
                .and(machine.path("l"))
        };
        machine.conduct("answers no-daemon");
        let mut killed = start().spawn();
        wait_for_call(&machine, "get_server_list");
        killed.kill().unwrap();
        killed.wait().unwrap();
        machine.conduct("");
        wait_until("only the daemon is left", || machine.daemons().len() == 1);

        let record = start().succeeds().json();
        assert_eq!(machine.daemons(), [pid(&record)], "explicit: {explicit}");
        machine.run(["stop"]).succeeds();
        left_nothing(&machine);
    }
}

// In the foreground.

#[test]
fn start_foreground() {
    let machine = Sandbox::new();
    let start = machine.run(["start", "--foreground"]).spawn();
    let file = machine.record_file(N0);
    wait_until("the record is there", || file.exists());
    let record = read_json(&file);
    assert_eq!(machine.daemons(), [pid(&record)]);
    let status = machine.run(["status"]).succeeds().text();
    assert!(status.contains("daemon name=gpu-u0 state=live"), "{status}");
    assert!(machine.calls().contains("nvidia-cuda-mps-control -f\n"));

    signal(pid_of(&start), Signal::SIGTERM);
    let (code, stdout, stderr) = end_of(start);
    assert_eq!(code, 143, "{stderr}");
    assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap(), record);
    assert!(stderr.contains("stand-in control daemon"), "{stderr}");
    left_nothing(&machine);
    assert_eq!(names_in(machine.runtime().join(N0)), ["log"]);
}

#[test]
fn a_foreground_daemon_can_be_stopped_from_elsewhere() {
    let machine = Sandbox::new();
    let start = machine.run(["start", "--foreground"]).spawn();
    wait_until("the record is there", || machine.record_file(N0).exists());
    let stopped = machine.run(["stop"]).succeeds().json();
    let (code, stdout, stderr) = end_of(start);
    assert_eq!(code, 0, "{stderr}");
    let record: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(stopped, json!({"stopped": [record]}));
    left_nothing(&machine);
}

#[test]
fn start_foreground_with_ui_success() {
    let machine = Sandbox::new();
    machine.sh("mkdir bin/inner; mv bin/nvidia-cuda-mps-control bin/inner");
    // A wrapper that stays in front of the daemon and of every question.
    let inner = machine.bin().join("inner/nvidia-cuda-mps-control");
    machine.script(
        "nvidia-cuda-mps-control",
        &format!("{} \"$@\"; exit $?", inner.display()),
    );
    let start = machine.run(["start", "--foreground"]).spawn();
    wait_until("the record is there", || machine.record_file(N0).exists());
    let record = read_json(machine.record_file(N0));
    assert_eq!(machine.daemons(), [pid(&record)]);
    machine.run(["stop"]).succeeds();
    let (code, _, stderr) = end_of(start);
    assert_eq!(code, 0, "{stderr}");
    left_nothing(&machine);
}

#[test]
fn a_foreground_daemon_that_ends_at_once_is_reported_with_its_status() {
    let machine = Sandbox::new();
    machine.script(
        "nvidia-cuda-mps-control",
        "[ \"$1\" = -f ] && { echo 'no privilege'; exit 3; }
         echo 'Cannot find MPS control daemon process' >&2; exit 1",
    );
    machine
        .run(["start", "--foreground"])
        .fails("the control daemon ended with status 3 before it was ready")
        .said("no privilege");
    left_nothing(&machine);
}

#[test]
fn a_foreground_start_that_is_interrupted_leaves_nothing() {
    let machine = Sandbox::new();
    machine.conduct("answers never");
    let start = machine.run(["start", "--foreground"]).spawn();
    wait_for_call(&machine, "get_server_list");
    signal(pid_of(&start), Signal::SIGINT);
    let (code, stdout, stderr) = end_of(start);
    assert_eq!((code, stdout.as_str()), (130, ""), "{stderr}");
    left_nothing(&machine);
}
