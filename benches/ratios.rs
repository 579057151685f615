//! What a command costs against the bare thing in the same run: `cargo bench`. The table is printed, and written to
//! `target/bench/ratios.json`.
//!
//! The other side of each figure is what a person would call without uni-cumps. nvidia-smi is a stand-in that takes 20 ms,
//! about as long as the real one; the control program is a stand-in, and NVIDIA's own where `tests/real_daemon/fetch` has
//! unpacked one.

#![allow(clippy::unwrap_used)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use serde_json::{Value, json};

use support::{Call, Sandbox};

/// Rounds of what takes a millisecond, and of what takes 20.
const MANY: usize = 501;
const SOME: usize = 51;
const FEW: usize = 15;

const MICRO: f64 = 1e6;

/// What a figure must not exceed.
#[derive(Clone, Copy)]
enum Target {
    /// Times as long as the bare thing.
    Ratio(f64),
    /// Longer than the bare thing by so many milliseconds.
    Above(f64),
}

/// One figure beside what it is held against.
struct Row {
    what: String,
    ours: f64,
    against: String,
    bare: f64,
    target: Target,
    /// Why it is not less.
    floor: Option<String>,
}

impl Row {
    fn figure(&self) -> f64 {
        match self.target {
            Target::Ratio(_) => self.ours / self.bare,
            Target::Above(_) => (self.ours - self.bare) * 1e3,
        }
    }

    fn limit(&self) -> f64 {
        match self.target {
            Target::Ratio(limit) | Target::Above(limit) => limit,
        }
    }

    fn is_met(&self) -> bool {
        self.figure() <= self.limit()
    }

    fn line(&self) -> String {
        let (figure, limit) = match self.target {
            Target::Ratio(limit) => (format!("{:.2} ×", self.figure()), format!("{limit:.1} ×")),
            Target::Above(limit) => (
                format!("+{:.2} ms", self.figure()),
                format!("+{limit:.1} ms"),
            ),
        };
        let verdict = match (self.is_met(), &self.floor) {
            (true, _) => "met".to_owned(),
            (false, Some(floor)) => format!("missed: {floor}"),
            (false, None) => "missed".to_owned(),
        };
        format!(
            "{:<34} {:>8.2} ms  {:<38} {:>8.2} ms {figure:>11} {limit:>9}  {verdict}",
            self.what,
            self.ours * 1e3,
            self.against,
            self.bare * 1e3,
        )
    }

    fn to_json(&self) -> Value {
        json!({
            "what": self.what,
            "median_us": self.ours * MICRO,
            "against": self.against,
            "against_median_us": self.bare * MICRO,
            "ratio": self.ours / self.bare,
            "difference_ms": (self.ours - self.bare) * 1e3,
            "limit": self.limit(),
            "limit_is": match self.target {
                Target::Ratio(_) => "ratio",
                Target::Above(_) => "difference_ms",
            },
            "met": self.is_met(),
        })
    }
}

/// A figure that needs no other beside it.
struct Count {
    what: String,
    value: f64,
    unit: &'static str,
    limit: Option<f64>,
}

impl Count {
    fn line(&self) -> String {
        let verdict = match self.limit {
            Some(limit) if self.value <= limit => format!("at most {limit}: met"),
            Some(limit) => format!("at most {limit}: missed"),
            None => String::new(),
        };
        format!(
            "{:<60} {:>10.2} {:<6} {verdict}",
            self.what, self.value, self.unit
        )
    }

    fn to_json(&self) -> Value {
        json!({"what": self.what, "value": self.value, "unit": self.unit, "limit": self.limit})
    }
}

fn main() {
    if let Some(command) = std::env::var_os("RATIOS_PEAK_OF") {
        return tell_peak(Path::new(&command));
    }
    let (mut rows, mut counts) = (Vec::new(), Vec::new());
    let machine = Sandbox::new();
    slow_nvidia_smi(&machine);
    machine.start(&[]);
    shell_start(&machine, &mut rows);
    machine.run(["stop"]).succeeds();
    life("stand-in", &machine, &mut rows);
    let unpacked = ["535", "550", "555"].map(|driver| (driver, control_of(driver)));
    for (driver, directory) in unpacked.iter().filter(|(_, directory)| directory.exists()) {
        let machine = Sandbox::with_real_control(directory, 1);
        slow_nvidia_smi(&machine);
        life(&format!("driver {driver}"), &machine, &mut rows);
    }
    many_records(&mut rows, &mut counts);
    sizes(&mut counts);

    println!(
        "medians; the last columns are what is held against the target, the target, and whether it is met\n"
    );
    rows.iter().for_each(|row| println!("{}", row.line()));
    println!();
    counts.iter().for_each(|count| println!("{}", count.line()));
    write_json(&rows, &counts);
}

fn control_of(driver: &str) -> PathBuf {
    support::target().join("mps").join(driver)
}

fn write_json(rows: &[Row], counts: &[Count]) {
    let directory = support::target().join("bench");
    fs::create_dir_all(&directory).unwrap();
    let report = json!({
        "against_the_bare_thing": rows.iter().map(Row::to_json).collect::<Vec<_>>(),
        "counts": counts.iter().map(Count::to_json).collect::<Vec<_>>(),
    });
    let text = serde_json::to_string_pretty(&report).unwrap();
    fs::write(directory.join("ratios.json"), text + "\n").unwrap();
}

/// nvidia-smi with a fixed cost.
fn slow_nvidia_smi(machine: &Sandbox) {
    let rows = fs::read_to_string(machine.bin().join("gpus.csv")).unwrap();
    machine.script("nvidia-smi", &format!("sleep 0.02\necho '{}'", rows.trim()));
}

fn bare<'m>(machine: &'m Sandbox, words: &[&str]) -> Call<'m> {
    machine.run([""; 0]).instead(words)
}

/// How long one call takes, in seconds. It must succeed.
fn time(call: &Call<'_>) -> f64 {
    time_of(call.command().stdout(Stdio::null()).stderr(Stdio::null()))
}

fn time_of(command: &mut Command) -> f64 {
    let begun = Instant::now();
    let status = command.status().unwrap();
    let taken = begun.elapsed();
    assert!(status.success(), "{command:?}: {status}");
    taken.as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The medians of several calls. They take turns, so that what else the machine does falls on all of them.
fn in_turns<const N: usize>(rounds: usize, calls: [&dyn Fn() -> f64; N]) -> [f64; N] {
    let mut times = [const { Vec::new() }; N];
    for _ in 0..rounds {
        for (times, call) in times.iter_mut().zip(calls) {
            times.push(call());
        }
    }
    times.map(median)
}

/// What stands in a shell's start-up file or in front of a program.
fn shell_start(machine: &Sandbox, rows: &mut Vec<Row>) {
    let [nothing, version, env, json, run] = in_turns(
        MANY,
        [
            &|| time(&bare(machine, &["/bin/true"])),
            &|| time(&machine.run(["--version"])),
            &|| time(&machine.run(["env"])),
            &|| time(&machine.run(["env", "--json"])),
            &|| time(&machine.run(["run", "--", "/bin/true"])),
        ],
    );
    let floor = format!(
        "to load the program and read its command line (--version) takes {:.2} × already",
        version / nothing
    );
    for (what, ours) in [("env", env), ("env --json", json)] {
        rows.push(Row {
            what: what.to_owned(),
            ours,
            against: "/bin/true".to_owned(),
            bare: nothing,
            target: Target::Ratio(1.6),
            floor: Some(floor.clone()),
        });
    }
    rows.push(Row {
        what: "run -- /bin/true".to_owned(),
        ours: run,
        against: "/bin/true".to_owned(),
        bare: nothing,
        target: Target::Above(1.5),
        floor: None,
    });
}

/// A daemon's life with this control program.
fn life(control: &str, machine: &Sandbox, rows: &mut Vec<Row>) {
    machine.start(&[]);
    let smi = || nvidia_smi(machine);
    let [bare_status, status, only_smi, version] = in_turns(
        SOME,
        [
            &smi,
            &|| time(&machine.run(["status", "--json"])),
            &|| time(&machine.run(["visibility", "0"])),
            &|| time(&machine.run(["--version"])),
        ],
    );
    machine.run(["stop"]).succeeds();
    let mut push = |what: &str, ours, against: &str, bare, limit, floor| {
        rows.push(Row {
            what: format!("{what} ({control})"),
            ours,
            against: against.to_owned(),
            bare,
            target: Target::Above(limit),
            floor: Some(floor),
        });
    };
    let floor = format!(
        "to call nvidia-smi and ask no daemon (visibility) takes {:+.2} ms already",
        (only_smi - bare_status) * 1e3
    );
    push(
        "status --json",
        status,
        "nvidia-smi",
        bare_status,
        3.0,
        floor,
    );

    let (mut start, mut stop, mut bare_start, mut bare_stop) = (vec![], vec![], vec![], vec![]);
    for _ in 0..SOME {
        start.push(time(&machine.run(["start"])));
        stop.push(time(&machine.run(["stop"])));
        let (up, down) = by_hand(machine);
        bare_start.push(up);
        bare_stop.push(down);
    }
    let by_hand = "nvidia-smi, control -d, one question";
    let floor = format!(
        "its own start takes {:.2} ms, and to write two records so that they last takes {:.2} ms",
        version * 1e3,
        two_records(machine) * 1e3
    );
    push(
        "start",
        median(start),
        by_hand,
        median(bare_start),
        5.0,
        floor,
    );
    let by_hand = "quit, and waiting for the exit";
    let floor = format!(
        "its own start takes {:.2} ms, 535 drops the session in which it quits, and the lock is waited for",
        version * 1e3
    );
    push("stop", median(stop), by_hand, median(bare_stop), 5.0, floor);
}

/// Writing, syncing and renaming two files of a record's size.
fn two_records(machine: &Sandbox) -> f64 {
    let once = || {
        let begun = Instant::now();
        for _ in 0..2 {
            let (aside, file) = (machine.path("aside"), machine.path("record"));
            fs::write(&aside, [b' '; 560]).unwrap();
            File::open(&aside).unwrap().sync_all().unwrap();
            fs::rename(aside, file).unwrap();
        }
        begun.elapsed().as_secs_f64()
    };
    let [median] = in_turns(SOME, [&once]);
    median
}

fn nvidia_smi(machine: &Sandbox) -> f64 {
    let program = machine.bin().join("nvidia-smi");
    let query = [
        "--query-gpu=index,uuid,compute_mode",
        "--format=csv,noheader",
    ];
    time(&bare(machine, &[program.to_str().unwrap()]).with(query))
}

/// The same sequence as a careful person would type it.
fn by_hand(machine: &Sandbox) -> (f64, f64) {
    let (pipe, log) = (machine.path("p"), machine.path("l"));
    fs::create_dir_all(&pipe).unwrap();
    fs::create_dir_all(&log).unwrap();
    let program = machine.bin().join("nvidia-cuda-mps-control");
    let control = |flags: &[&str], question: &str| {
        let input = machine.path("question");
        fs::write(&input, question).unwrap();
        let call = bare(machine, &[program.to_str().unwrap()])
            .with(flags)
            .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
            .env("CUDA_MPS_LOG_DIRECTORY", &log);
        // A daemon keeps a pipe open, so its output must not go through one.
        let mut command = call.command();
        command.stdin(File::open(input).unwrap());
        time_of(command.stdout(Stdio::null()).stderr(Stdio::null()))
    };
    let up = nvidia_smi(machine) + control(&["-d"], "") + control(&[], "get_server_list\n");
    let daemon = machine.daemons()[0];
    let down = control(&[], "quit\n");
    let begun = Instant::now();
    while support::is_running(daemon) {
        std::thread::sleep(Duration::from_micros(50));
    }
    (up, down + begun.elapsed().as_secs_f64())
}

/// What a command costs among the records of daemons that are gone.
fn many_records(rows: &mut Vec<Row>, counts: &mut Vec<Count>) {
    let machine = Sandbox::new();
    slow_nvidia_smi(&machine);
    // No process has ever a number above 2^22.
    let mut gone = machine.reference_record("gone", 1 << 23);
    let mut written = 0;
    let mut first: Option<[f64; 3]> = None;
    for records in [1, 10, 100, 1_000, 10_000] {
        for number in written..records - 1 {
            let name = format!("gone-{number}");
            gone["name"] = name.as_str().into();
            machine.write_record(&name, &gone);
        }
        written = records - 1;
        machine.start(&["--name", "live"]);
        // One behind the other: after a look at many records the next call finds the caches full of them.
        let [env] = in_turns(MANY, [&|| time(&machine.run(["env", "--name", "live"]))]);
        let [status] = in_turns(FEW, [&|| time(&machine.run(["status", "--json"]))]);
        machine.run(["stop", "--name", "live"]).succeeds();
        let stops = (0..FEW).map(|_| {
            machine.start(&["--name", "live"]);
            time(&machine.run(["stop", "--name", "live"]))
        });
        let stop = median(stops.collect());
        let [env_of_one, status_of_one, stop_of_one] = *first.get_or_insert([env, status, stop]);
        if records == 1 {
            continue;
        }
        for (what, ours, bare) in [
            ("env --name", env, env_of_one),
            ("stop --name", stop, stop_of_one),
        ] {
            rows.push(Row {
                what: format!("{what}, {records} records"),
                ours,
                against: "with one record".to_owned(),
                bare,
                target: Target::Ratio(1.1),
                floor: None,
            });
        }
        counts.push(Count {
            what: format!("status --json with {records} records, for each more than one"),
            value: (status - status_of_one) * MICRO / f64::from(records - 1),
            unit: "µs",
            // With few records it is the noise of the rest.
            limit: (records >= 1_000).then_some(30.0),
        });
    }
}

fn sizes(counts: &mut Vec<Count>) {
    let machine = Sandbox::new();
    slow_nvidia_smi(&machine);
    machine.start(&[]);
    for command in ["env", "run -- /bin/true", "status --json", "doctor"] {
        counts.push(Count {
            what: format!("peak memory of {command}, with what it calls"),
            value: peak(&machine.run(command.split(' '))),
            unit: "MiB",
            limit: Some(6.0),
        });
    }
    counts.push(Count {
        what: "size of the binary".to_owned(),
        value: fs::metadata(support::uni_cumps()).unwrap().len() as f64 / f64::from(1 << 20),
        unit: "MiB",
        limit: Some(3.0),
    });
    if let Some(strace) = support::installed("strace") {
        let summary = machine.path("strace");
        let counting = [
            strace.to_str().unwrap(),
            "-c",
            "-U",
            "calls,name",
            "-o",
            summary.to_str().unwrap(),
        ];
        machine.run(["env"]).under(counting).succeeds();
        let summary = fs::read_to_string(summary).unwrap();
        let mut total = summary.lines().last().unwrap().split_whitespace();
        counts.push(Count {
            what: "system calls of env".to_owned(),
            value: total.next().unwrap().parse().unwrap(),
            unit: "",
            limit: None,
        });
    }
}

/// The peak resident memory of a call, in MiB. A process of its own waits for it, since the kernel tells the largest of all
/// children that have ended.
fn peak(call: &Call<'_>) -> f64 {
    let command = call.command();
    let output = Command::new(std::env::current_exe().unwrap())
        .env_clear()
        .envs(command.get_envs().map(|(key, value)| (key, value.unwrap())))
        .env("RATIOS_PEAK_OF", command.get_program())
        .args(command.get_args())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

fn tell_peak(program: &Path) {
    let mut command = Command::new(program);
    command
        .args(std::env::args_os().skip(1))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    // doctor may find something.
    command.status().unwrap();
    let kibibytes = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap().max_rss();
    println!("{}", kibibytes as f64 / 1024.0);
}
