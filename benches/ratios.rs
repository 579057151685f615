//! What a command costs, as a ratio against the bare thing in the same run: `cargo bench`.
//!
//! The other side of each ratio is what a person would call without uni-cumps. The control daemon is NVIDIA's own where
//! `tests/real_daemon/fetch` has unpacked one, and the stand-in elsewhere.

#![allow(clippy::unwrap_used)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use support::Sandbox;

const ROUNDS: usize = 101;

fn main() {
    let driver = ["550", "535", "555"].into_iter().find_map(|driver| {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("target/mps")
            .join(driver);
        directory.exists().then_some((driver, directory))
    });
    let (daemon, machine) = match &driver {
        Some((driver, directory)) => (
            format!("NVIDIA's control program of driver {driver}"),
            Sandbox::with_real_control(directory, 1),
        ),
        None => ("a stand-in control program".to_owned(), Sandbox::new()),
    };
    println!("medians of {ROUNDS} rounds, with {daemon}");
    println!(
        "{:<16} {:>9}  {:<44} {:>9} {:>7}",
        "command", "median", "against", "median", "ratio"
    );

    machine.start(&[]);
    let yardstick = || time(&mut bare(&machine, "/bin/true"));
    row(
        "env",
        &|| time(&mut machine.run(["env"]).command()),
        "/bin/true",
        &yardstick,
    );
    row(
        "run /bin/true",
        &|| time(&mut machine.run(["run", "--", "/bin/true"]).command()),
        "/bin/true",
        &yardstick,
    );
    row(
        "status --json",
        &|| time(&mut machine.run(["status", "--json"]).command()),
        "nvidia-smi --query-gpu=…",
        &|| nvidia_smi(&machine),
    );
    machine.run(["stop"]).succeeds();

    let (mut start, mut stop, mut bare_start, mut bare_stop) = (vec![], vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        start.push(time(&mut machine.run(["start"]).command()));
        stop.push(time(&mut machine.run(["stop"]).command()));
        let (up, down) = by_hand(&machine);
        bare_start.push(up);
        bare_stop.push(down);
    }
    print_row(
        "start",
        median(start),
        "nvidia-smi, -d, one question by hand",
        median(bare_start),
    );
    print_row(
        "stop",
        median(stop),
        "quit, waiting for the process by hand",
        median(bare_stop),
    );
}

fn bare(machine: &Sandbox, program: &str) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", machine.bin())
        .stdin(Stdio::null());
    command
}

fn time(command: &mut Command) -> Duration {
    let begun = Instant::now();
    let output = command.output().unwrap();
    let taken = begun.elapsed();
    assert!(output.status.success(), "{output:?}");
    taken
}

fn nvidia_smi(machine: &Sandbox) -> Duration {
    let program = machine.bin().join("nvidia-smi");
    time(bare(machine, program.to_str().unwrap()).args([
        "--query-gpu=index,uuid,compute_mode",
        "--format=csv,noheader",
    ]))
}

/// The same sequence as a careful person would type it.
fn by_hand(machine: &Sandbox) -> (Duration, Duration) {
    let (pipe, log) = (machine.path("p"), machine.path("l"));
    std::fs::create_dir_all(&pipe).unwrap();
    std::fs::create_dir_all(&log).unwrap();
    let control = |args: &[&str], question: &str| {
        let input = machine.path("question");
        std::fs::write(&input, question).unwrap();
        // A daemon keeps a pipe open, so its output must not go through one.
        let begun = Instant::now();
        let status = bare(
            machine,
            machine
                .bin()
                .join("nvidia-cuda-mps-control")
                .to_str()
                .unwrap(),
        )
        .args(args)
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .env("CUDA_MPS_LOG_DIRECTORY", &log)
        .stdin(std::fs::File::open(input).unwrap())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
        assert!(status.success());
        begun.elapsed()
    };
    let up = nvidia_smi(machine) + control(&["-d"], "") + control(&[], "get_server_list\n");
    let daemon = machine.daemons()[0];
    let down = control(&[], "quit\n");
    let begun = Instant::now();
    while support::is_running(daemon) {
        std::thread::sleep(Duration::from_micros(200));
    }
    (up, down + begun.elapsed())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn row(name: &str, ours: &dyn Fn() -> Duration, against: &str, theirs: &dyn Fn() -> Duration) {
    let (mut our_times, mut their_times) = (vec![], vec![]);
    // In turns, so that what else the machine does falls on both.
    for _ in 0..ROUNDS {
        our_times.push(ours());
        their_times.push(theirs());
    }
    print_row(name, median(our_times), against, median(their_times));
}

fn print_row(name: &str, ours: Duration, against: &str, theirs: Duration) {
    let ratio = ours.as_secs_f64() / theirs.as_secs_f64();
    println!("{name:<16} {ours:>9.2?}  {against:<44} {theirs:>9.2?} {ratio:>7.2}");
}
