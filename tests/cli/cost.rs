//! What commands cost, in things that can be counted: calls of other programs, and instructions of `env`, which is on the
//! path of every new shell. What they cost in time is `cargo bench`'s business.

use crate::support::{N0, Sandbox, U0, installed};

/// Whom each command calls. With --exclusive the modes are looked at once more under the lock, where nobody changes them.
const CALLS: &str = "\
start --gpus 0 --name a: control, control -d, nvidia-smi
env: nobody
env --json: nobody
env --name a: nobody
env --unset: nobody
run -- /bin/true: nobody
run --start --gpus 0 -- /bin/true: nvidia-smi
status: control, nvidia-smi
status --json: control, nvidia-smi
wait --for ready: control
clients: control
limits: control, control, control, control
limits --set threads=50: control, control, control, control, control, control
cpus: nobody
doctor --gpus 0: control, nvidia-smi
visibility 0: nvidia-smi
logs: nobody
prune: nobody
stop: control
stop --all: nobody
start --gpus 1 --exclusive --threads 50: control, control, control -d, nvidia-smi, nvidia-smi, nvidia-smi sets
stop: control, nvidia-smi, nvidia-smi sets
completions bash: nobody
man: nobody
";

/// The calls since the last time, each as the program's name and what it was called for.
fn called(machine: &Sandbox) -> String {
    let calls = machine.calls();
    let lines = calls.lines().filter(|line| !line.starts_with(' '));
    let mut calls: Vec<&str> = lines
        .map(|line| match line {
            _ if line.contains(" -c ") => "nvidia-smi sets",
            _ if line.starts_with("nvidia-smi") => "nvidia-smi",
            _ if line.ends_with(" -d") => "control -d",
            _ => "control",
        })
        .collect();
    // Side by side they come in any order.
    calls.sort();
    match calls.is_empty() {
        true => "nobody".to_owned(),
        false => calls.join(", "),
    }
}

#[test]
fn no_command_calls_more_programs_than_this() {
    let machine = Sandbox::with_gpus(2);
    let mut table = String::new();
    for line in CALLS.lines() {
        let (line, _) = line.split_once(": ").unwrap();
        machine.run(line.split(' ')).succeeds();
        table += &format!("{line}: {}\n", called(&machine));
    }
    assert_eq!(table, CALLS);
}

#[test]
fn the_first_and_last_rank_of_a_node_asks_nvidia_smi_once() {
    let machine = Sandbox::new();
    machine
        .run(["run", "--per-node", "--", "/bin/true"])
        .succeeds();
    assert_eq!(called(&machine), "control, control, control -d, nvidia-smi");
}

#[test]
fn status_asks_nvidia_smi_and_the_daemon_side_by_side() {
    let machine = Sandbox::new();
    machine.start(&[]);
    machine.calls();
    // nvidia-smi ends when the daemon was asked, and not before.
    let rows = std::fs::read_to_string(machine.bin().join("gpus.csv")).unwrap();
    let calls = machine.bin().join("calls");
    let calls = calls.display();
    machine.script(
        "nvidia-smi",
        &format!("until grep -q get_server_list {calls}; do sleep 0.01; done\necho '{rows}'"),
    );
    let report = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(report["gpus"][0]["uuid"], U0);
    assert_eq!(report["managed_daemons"][0]["name"], N0);
    assert_eq!(report["managed_daemons"][0]["servers"], 0);
}

/// Instructions of `env` with one live daemon in the build that the tests run, from its first to its last.
const INSTRUCTIONS: u64 = 2_445_232;

#[test]
fn env_takes_no_more_instructions_than_recorded() {
    let Some(valgrind) = installed("valgrind") else {
        return;
    };
    let machine = Sandbox::new();
    machine.start(&[]);
    let counting = ["--tool=callgrind", "--callgrind-out-file=/dev/null"];
    let wrapper = [valgrind.to_str().unwrap()].into_iter().chain(counting);
    let counted = machine.run(["env"]).under(wrapper).succeeds();
    let taken = counted
        .stderr
        .lines()
        .find_map(|line| line.split_once("Collected : "));
    let taken: u64 = taken.expect("valgrind counts").1.trim().parse().unwrap();
    assert!(
        taken.abs_diff(INSTRUCTIONS) * 10 <= INSTRUCTIONS,
        "`env` takes {taken} instructions, and {INSTRUCTIONS} are recorded in {}: more than a tenth away",
        file!()
    );
}
