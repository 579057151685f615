//! `cpus`: the plan of this machine and of captured ones, as scripts and people read it, and that nothing is done for it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::support::{
    Call, Sandbox, U0, U1, installed, set_mode, uni_cumps, wait_until, without_root,
};

/// By its whole path: other tests change the directory.
const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/cpu-plan.json");

/// A machine of the recorded vectors, in the directory `m`.
fn captured(host: &str) -> Sandbox {
    let machine = Sandbox::new();
    let text = fs::read_to_string(VECTORS).unwrap();
    let vectors: Value = serde_json::from_str(&text).unwrap();
    for (path, text) in vectors["hosts"][host].as_object().unwrap() {
        write(&machine, path, text.as_str().unwrap());
    }
    machine
}

/// A file of the captured machine.
fn write(machine: &Sandbox, path: &str, text: &str) {
    let path = machine.path("m").join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// The captured machine's plan.
fn cpus<'s>(machine: &'s Sandbox, args: &[&str]) -> Call<'s> {
    machine
        .run(["cpus", "--root"])
        .and(machine.path("m"))
        .with(args)
}

/// Everything that is there: in the sandbox, and where lock files go.
fn traces(machine: &Sandbox) -> String {
    machine.sh(
        "find . -not -path './bin/calls' | sort; find /run/lock/uni-cumps /tmp/uni-cumps-locks 2>&1 | sort",
    )
}

// What is printed.

#[test]
fn the_plan_of_two_gpus_on_two_nodes_for_scripts() {
    let machine = captured("two_gpu_two_node_32t");
    cpus(&machine, &["--mask", "0-31"]).prints(
        "mask=0-31
quota=none
usable=32
gpu address=0000:17:00.0 node=0 allowed=0-7,16-23 rank=0 of=1 workers=0,16;1,17;2,18;3,19;4,20;5,21;6,22 service=7 claimed_by=nobody
gpu address=0000:ca:00.0 node=1 allowed=8-15,24-31 rank=0 of=1 workers=8,24;9,25;10,26;11,27;12,28;13,29;14,30 service=15 claimed_by=nobody
plan kind=auto pinned=0,7-8,16,24 left=27 why=auto: the first worker is on GPU 1 of 1 on a NUMA node with the allowed CPUs 0-7,16-23
worker number=0 cpus=0,16 why=auto: GPU 1 of 1 on a NUMA node with the allowed CPUs 0-7,16-23
worker number=1 cpus=8,24 why=auto: GPU 1 of 1 on a NUMA node with the allowed CPUs 8-15,24-31
service cpu=7
pools preprocess_threads=4 png_threads=8 encode_workers=3 copy_workers=9
",
    ).said_nothing();
}

#[test]
fn the_plan_of_two_gpus_on_one_node_as_json() {
    let machine = captured("two_gpu_one_node_16t");
    let args = ["--mask", "0-15", "--quota", "9.5", "--json"];
    let plan = cpus(&machine, &args).succeeds().said_nothing().json();
    let why = |nth| format!("GPU {nth} of 2 on a NUMA node with the allowed CPUs 0-15");
    let gpu = |address, rank, workers: [&str; 3], service, share| {
        json!({
            "address": address, "node": "0", "allowed": "0-15", "share": share, "rank": rank, "of": 2,
            "workers": workers, "service": service, "holders": []
        })
    };
    assert_eq!(
        plan,
        json!({
            "mask": "0-15",
            "quota": 9.5,
            "quota_file": "--quota",
            "usable": 9,
            "plan": {
                "kind": "auto",
                "workers": [
                    {"cpus": "0-1", "why": format!("auto: {}", why(1))},
                    {"cpus": "2-3", "why": format!("auto: {}", why(2))}
                ],
                "service": 14,
                "pinned": "0-3,14",
                "left": 4,
                "why": format!("auto: the first worker is on {}", why(1))
            },
            "pools": {"preprocess_threads": 1, "png_threads": 4, "encode_workers": 1, "copy_workers": 4},
            "gpus": [
                gpu("0000:41:00.0", 0, ["0-1", "4-5", "8-9"], 14, "0-1,4-11,14-15"),
                gpu("0000:81:00.0", 1, ["2-3", "6-7", "10-11"], 12, "2-13")
            ]
        })
    );
}

#[test]
fn a_person_sees_a_map() {
    let machine = captured("two_gpu_two_node_32t");
    write(
        &machine,
        "sys/devices/system/node/node0/cpulist",
        "0-7,16-23\n",
    );
    write(
        &machine,
        "sys/devices/system/node/node1/cpulist",
        "8-15,24-31\n",
    );
    write(&machine, "sys/devices/system/node/node2/cpulist", "\n");
    let line = format!("{} cpus --root m --mask 0-31", uni_cumps().display());
    let shown = machine.on_a_terminal(&line).env("TERM", "dumb").succeeds();
    assert_eq!(
        shown.text().replace("\r\n", "\n"),
        "CPUs 0-31: 32 usable, 27 left beside the pinned ones

NODE  CORES
0     A......a
1     B......b

GPU  ADDRESS       NODE  RANK    WORKERS                                  SERVICE  CLAIMED BY
A    0000:17:00.0  0     1 of 1  0,16 1,17 2,18 3,19 4,20 5,21 6,22       7        
B    0000:ca:00.0  1     1 of 1  8,24 9,25 10,26 11,27 12,28 13,29 14,30  15       

auto auto: the first worker is on GPU 1 of 1 on a NUMA node with the allowed CPUs 0-7,16-23
preprocess_threads=4 png_threads=8 encode_workers=3 copy_workers=9
"
    );
}

#[test]
fn cores_of_no_known_node_are_on_the_map_as_well() {
    let machine = captured("one_gpu_16c");
    let map = |mask: &str| {
        let line = format!("{} cpus --root m --mask {mask}", uni_cumps().display());
        let shown = machine.on_a_terminal(&line).env("TERM", "dumb").succeeds();
        let text = shown.text().replace("\r\n", "\n");
        let (_, map) = text.split_once("NODE  CORES\n").unwrap();
        map.split("\n\n").next().unwrap().to_owned()
    };
    assert_eq!(map("0-15"), "all   A....... .......a");
    write(&machine, "sys/devices/system/node/node0/cpulist", "0-7\n");
    assert_eq!(map("0-15"), "0     A.......\n?     .......a");
    assert_eq!(map("0-7"), "0     A......a");
}

#[test]
fn nothing_of_a_captured_machine_acts_on_a_terminal() {
    let machine = captured("one_gpu_16c");
    let node = "sys/bus/pci/devices/0000:01:00.0/numa_node";
    write(&machine, node, "\x1b[2J\u{202e}0\ngpu address=x\r\x07\n");
    write(&machine, "proc/self/cgroup", "0::/\x1b]0;x\x07\n");
    write(
        &machine,
        "sys/fs/cgroup/\x1b]0;x\x07/cpu.max",
        "800000 100000\n",
    );
    let plain = cpus(&machine, &["--mask", "0-15"]).succeeds();
    let person = format!("{} cpus --root m --mask 0-15", uni_cumps().display());
    let person = machine
        .on_a_terminal(&person)
        .env("TERM", "dumb")
        .succeeds();
    let json = cpus(&machine, &["--mask", "0-15", "--json"]).succeeds();
    assert_eq!(json.json()["usable"], 8);
    for done in [plain, person, json] {
        let text = done.text().replace("\r\n", "\n");
        let acts = |letter: char| letter.is_control() && letter != '\n' || letter == '\u{202e}';
        assert!(!text.contains(acts), "{text:?}");
        assert!(!text.contains("\ngpu address=x"), "{text:?}");
    }
}

// What is asked for.

#[test]
fn devices_are_planned_in_the_order_of_the_workers() {
    let machine = captured("two_gpu_two_node_32t");
    let workers = |args: &[&str]| {
        let args = [&["--mask", "0-31", "--json"], args].concat();
        let plan = cpus(&machine, &args).succeeds().said_nothing().json()["plan"].clone();
        let workers = plan["workers"].as_array().unwrap().iter();
        let cpus: Vec<String> = workers
            .map(|worker| worker["cpus"].as_str().unwrap_or("null").to_owned())
            .collect();
        format!("{} service {}", cpus.join(" "), plan["service"])
    };
    assert_eq!(workers(&[]), "0,16 8,24 service 7");
    assert_eq!(
        workers(&["--workers", "2"]),
        "0,16 1,17 8,24 9,25 service 7"
    );
    // In nvidia-smi's spelling, and beside a worker without a GPU.
    let both = [
        "--device",
        "00000000:CA:00.0",
        "--device",
        "-",
        "--device=0000:17:00.0",
    ];
    assert_eq!(workers(&both), "8,24 9,25 0,16 service 15");
    assert_eq!(workers(&["--device", "-"]), "0,16 service 15");
    assert_eq!(
        workers(&["--device=-", "--workers=2"]),
        "0,16 1,17 service 15"
    );
    assert_eq!(workers(&["--device", "0000:99:00.0"]), "0,16 service 15");
    assert_eq!(
        workers(&["--core", "4", "--workers=2"]),
        "4,20 5,21 6,22 7,23 service 15"
    );
    assert_eq!(workers(&["--core", "off"]), "null null service null");
}

#[test]
fn a_core_that_cannot_be_had_is_a_failure_with_a_hint() {
    let machine = captured("two_gpu_two_node_32t");
    for (core, code, sentence) in [
        (
            "5",
            "core-outside-mask",
            "CPU 5 is not among the CPUs that this process may use, 0-3,16-19",
        ),
        (
            "99999999999999999999",
            "core-outside-mask",
            "is not among the CPUs",
        ),
        (
            "3",
            "too-few-cores",
            "from CPU 3 on there are 0 core(s) for 2 worker(s)",
        ),
        (
            "2",
            "too-few-cores",
            "from CPU 2 on there are 1 core(s) for 2 worker(s)",
        ),
    ] {
        let args = ["--mask", "0-3,16-19", "--core", core];
        let hint = match code {
            "core-outside-mask" => "hint: --core 0, or --core auto\n",
            _ => "hint: --core auto, or a lower number\n",
        };
        cpus(&machine, &args).fails(sentence).said(hint);
        let done = cpus(&machine, &args).and("--json").finish().exited(1);
        let error = done.json()["error"].clone();
        assert_eq!(error["code"], code);
        assert!(
            error["message"].as_str().unwrap().contains(sentence),
            "{error}"
        );
        assert_eq!(error["hint"], hint.trim_start_matches("hint: ").trim_end());
    }
    // The only other CPU would be the service's.
    cpus(&machine, &["--mask", "0-1", "--core", "0", "--device=-"])
        .fails("CPU 0 for 1 worker(s) pins each of the CPUs that this process may use, 0-1");
}

#[test]
fn what_makes_no_sense_is_not_understood() {
    let machine = captured("one_gpu_16c");
    for (wrong, sentence) in [
        (
            "--core=nonsense",
            "is none of auto, off and the number of a CPU",
        ),
        ("--core=-1", "is none of auto, off and the number of a CPU"),
        ("--core=", "is none of auto, off and the number of a CPU"),
        ("--core=1.5", "is none of auto, off and the number of a CPU"),
        ("--mask=", "it names no CPU"),
        ("--mask=5-3", "it names no CPU"),
        (
            "--mask=0-10:2",
            "is not a CPU number or a range such as 0-3",
        ),
        ("--mask=0xff", "is not a CPU number or a range such as 0-3"),
        ("--mask=0-65536", "is beyond the highest CPU number"),
        ("--quota=0", "it must be a number above 0, such as 2.5"),
        ("--quota=-1", "it must be a number above 0, such as 2.5"),
        ("--quota=max", "it must be a number above 0, such as 2.5"),
        ("--quota=nan", "it must be a number above 0, such as 2.5"),
        ("--quota=inf", "it must be a number above 0, such as 2.5"),
        (
            "--device=01:00.0",
            "is not a PCI address such as 0000:01:00.0",
        ),
        ("--device=0", "is not a PCI address such as 0000:01:00.0"),
        ("--device=--", "is not a PCI address such as 0000:01:00.0"),
        ("--workers=0", "0 is not in 1..=1024"),
        ("--workers=1025", "1025 is not in 1..=1024"),
        ("--gpus=0", "cannot be used with"),
        ("surplus", "unexpected argument"),
    ] {
        cpus(&machine, &[wrong]).breaks_usage().said(sentence);
    }
}

#[test]
fn where_nothing_can_be_pinned_it_is_said_why() {
    let machine = captured("no_sys");
    let why = |args: &[&str]| {
        let plan = cpus(&machine, args)
            .and("--json")
            .succeeds()
            .said_nothing()
            .json();
        assert_eq!(plan["plan"]["pinned"], "");
        assert_eq!(plan["plan"]["service"], Value::Null);
        assert_eq!(plan["gpus"], json!([]));
        let text = |key: &str| plan["plan"][key].as_str().unwrap().to_owned();
        (text("kind"), text("why"))
    };
    let (kind, said) = why(&["--mask", "0-7"]);
    assert_eq!(kind, "none_no_cpu_or_worker");
    assert_eq!(
        said,
        "nothing is pinned: there is no CPU or no worker to place"
    );
    let (kind, said) = why(&["--mask", "0-7", "--device=-", "--quota=2"]);
    assert_eq!(kind, "none_quota_too_small");
    assert!(said.contains("the quota of 2 CPUs in --quota"), "{said}");
    let (kind, _) = why(&["--mask", "3", "--device=-"]);
    assert_eq!(kind, "none_pool_too_small");
    let (kind, _) = why(&["--mask", "3-4", "--device=-"]);
    assert_eq!(kind, "none_would_pin_all");
    // Nobody says which CPUs there are.
    let empty = machine.path("empty");
    fs::create_dir(&empty).unwrap();
    machine
        .run(["cpus", "--root"])
        .and(&empty)
        .fails("the CPUs that a process may use are not known")
        .said("hint: --mask 0-7, with the CPUs of the machine\n");
}

// What it does for it.

#[test]
fn nothing_is_called_and_nothing_is_left() {
    let machine = captured("two_gpu_two_node_32t");
    machine.start(&[]);
    machine.calls();
    let before = traces(&machine);
    machine.run(["cpus"]).succeeds().said_nothing();
    machine.run(["cpus", "--json"]).succeeds().said_nothing();
    machine.run(["cpus", "--lock-prefix", "t/other"]).succeeds();
    cpus(&machine, &["--mask", "0-31"]).succeeds();
    // The mask is this machine's.
    cpus(&machine, &["--mask", "0-31"])
        .env("CUDA_VISIBLE_DEVICES", "0")
        .succeeds();
    machine
        .run(["cpus", "--device", "0000:01:00.0"])
        .env("CUDA_VISIBLE_DEVICES", "0")
        .succeeds();
    assert_eq!(machine.calls(), "");
    assert_eq!(traces(&machine), before);
}

#[test]
fn a_machine_without_any_of_nvidias_programs_has_cpus() {
    let machine = Sandbox::new();
    machine.remove_program("nvidia-smi");
    let done = machine.run(["cpus"]).succeeds().said_nothing();
    assert!(done.text().starts_with("mask="), "{done:?}");
    machine.run(["cpus", "--gpus", "0"]).fails("nvidia-smi");
}

/// Files of the kernel module that say where two GPUs sit, and a directory for locks, in a mount namespace.
fn with_addresses<'s>(machine: &Sandbox, call: Call<'s>) -> Call<'s> {
    let mount = "mount --bind $S/m/sys/bus/pci/devices /sys/bus/pci/devices
mount --bind $S/m/driver /proc/driver
exec \"$@\"";
    call.under(["/usr/bin/unshare", "-m", "/bin/sh", "-ec", mount, "sh"])
        .env("S", machine.path(""))
        .env("PATH", format!("{}:/usr/bin:/bin", machine.bin().display()))
}

#[test]
fn chosen_gpus_cost_one_question() {
    if without_root() {
        return;
    }
    let machine = captured("two_gpu_two_node_32t");
    machine.gpu_rows(format!("0, {U1}, Default\n1, {U0}, Default\n"));
    for (address, uuid) in [("0000:17:00.0", U0), ("0000:ca:00.0", U1)] {
        let file = format!("driver/nvidia/gpus/{address}/information");
        write(&machine, &file, &format!("GPU UUID: \t {uuid}\n"));
    }
    let workers = |args: &[&str], visible: Option<&str>| {
        let call = machine.run(["cpus", "--mask", "0-31", "--json"]).with(args);
        let call = visible
            .into_iter()
            .fold(call, |call, gpus| call.env("CUDA_VISIBLE_DEVICES", gpus));
        let plan = with_addresses(&machine, call)
            .succeeds()
            .said_nothing()
            .json();
        let workers = plan["plan"]["workers"].as_array().unwrap().iter();
        let cpus: Vec<Value> = workers.map(|worker| worker["cpus"].clone()).collect();
        (cpus, machine.calls().lines().count())
    };
    let unasked = workers(&[], None);
    assert_eq!(unasked.1, 0);
    let (order, calls) = workers(&["--gpus", "0,1"], None);
    assert_eq!((order.len(), calls), (2, 1));
    let (reversed, calls) = workers(&["--gpus", "1,0"], None);
    assert_eq!(calls, 1);
    assert_eq!(reversed, [order[1].clone(), order[0].clone()]);
    // nvidia-smi's numbers are not in the order of the addresses.
    assert_eq!(unasked.0, reversed);
    assert_eq!(workers(&[], Some("1")), (vec![order[1].clone()], 1));
    assert_eq!(workers(&["--gpus", "all"], Some(U1)), (order, 1));
    assert_eq!(workers(&[], Some("")).0, [Value::Null; 0]);
}

// Who holds a lock.

/// Another program that holds a lock as Python programs do.
struct Holding(Child);

impl Holding {
    fn begin(python: &Path, file: &Path) -> Self {
        let program = "import fcntl, sys, time
lock = open(sys.argv[1], 'w')
fcntl.flock(lock, fcntl.LOCK_EX)
print('held', flush=True)
time.sleep(600)";
        let mut child = Command::new(python)
            .args(["-c", program])
            .arg(file)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "held\n");
        Self(child)
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_holder_of_another_programs_lock_is_named() {
    if without_root() {
        return;
    }
    let Some(python) = installed("python3") else {
        return;
    };
    let machine = captured("one_gpu_16c");
    fs::create_dir(machine.path("m/driver")).unwrap();
    let claimed_by = |prefix: &str| {
        let call = machine.run(["cpus", "--lock-prefix", prefix]);
        let text = with_addresses(&machine, call)
            .succeeds()
            .said_nothing()
            .text();
        let (_, by) = text.split_once(" claimed_by=").unwrap();
        by.lines().next().unwrap().to_owned()
    };
    let file = machine.path("t/other-0000:01:00.0.lock");
    let absolute = machine.path("t/other").display().to_string();
    assert_eq!(claimed_by("t/other"), "nobody");
    assert!(!file.exists());
    let holding = Holding::begin(&python, &file);
    let pid = holding.0.id().to_string();
    assert_eq!(claimed_by("t/other"), pid);
    assert_eq!(claimed_by(&absolute), pid);
    assert_eq!(claimed_by("t/another"), "nobody");
    // Who may not even read it still sees who holds it.
    set_mode(&file, 0);
    assert_eq!(claimed_by("t/other"), pid);
    drop(holding);
    wait_until("the lock is free", || claimed_by("t/other") == "nobody");
    assert!(file.exists());
}

// What doctor has captured.

#[test]
fn a_capture_of_this_machine_has_its_plan() {
    let machine = Sandbox::new();
    machine
        .run(["doctor", "--capture"])
        .and(machine.path("m"))
        .succeeds();
    for args in [
        &["--json"][..],
        &["--json", "--device=-"],
        &["--json", "--device=-", "--core=0", "--mask=0-3"],
    ] {
        let here = machine.run(["cpus"]).with(args).succeeds().json();
        let there = cpus(&machine, args).succeeds().json();
        assert_eq!(here, there);
    }
}
