//! `run --cpus`: on which CPUs the program really runs, what it is told of them, and who holds a GPU for how long. Where a
//! GPU has to sit somewhere, calls go into a mount namespace in which made-up files stand for the kernel's; the lock files
//! are there as well, so that they go with the sandbox.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Child;

use nix::sys::signal::Signal;
use uni_cumps::cpus::CpuSet;

use crate::directories::{home_of, mode};
use crate::run::{machine, run, run_sh};
use crate::support::{Call, Done, Sandbox, U0, say, set_mode, signal, wait_until, without_root};

const USER: u32 = 1000;
const ADDRESS: &str = "0000:01:00.0";

/// What a program sees of its CPUs.
const SHOW: &str = "taskset -cp $$; env | grep -E '^UNI_CUMPS_|_NUM_THREADS=' | sort";

/// A program that shows it in a file and stays.
const STAY: &str =
    "{ taskset -cp $$; env | grep -E '^UNI_CUMPS_|_NUM_THREADS=' | sort; } > $S/$NAME.part
mv $S/$NAME.part $S/$NAME
exec sleep 600";

/// The mounts in which a call sees the made-up machine. CPUs have no siblings there.
const ENTER: &str = "mount --bind $S/pci /sys/bus/pci/devices
mount --bind $S/cpu /sys/devices/system/cpu
mount --bind $S/driver /proc/driver
mount --bind $S/lock /run/lock
exec \"$@\"";

/// The CPUs that a process may use, by its `/proc/<pid>/status`.
fn allowed(status: &str) -> CpuSet {
    let mut lines = status.lines();
    let list = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.unwrap().parse().unwrap()
}

/// The CPUs that tests may use.
fn ours() -> CpuSet {
    allowed(&fs::read_to_string("/proc/self/status").unwrap())
}

/// The lowest CPU that tests may use, and the highest, which on a small machine is the same.
fn ends() -> (usize, usize) {
    let cpus: Vec<usize> = ours().iter().collect();
    (cpus[0], cpus[cpus.len() - 1])
}

fn set(text: &str) -> CpuSet {
    text.parse().unwrap()
}

/// What `SHOW` has printed.
#[derive(Debug)]
struct Seen {
    cpus: CpuSet,
    variables: BTreeMap<String, String>,
}

impl Seen {
    fn of(text: &str) -> Self {
        let mut lines = text.lines();
        let first = lines.next().unwrap();
        let (_, list) = first.rsplit_once(' ').unwrap();
        let variables = lines.filter_map(|line| line.split_once('='));
        Self {
            cpus: set(list),
            variables: variables
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect(),
        }
    }

    fn variable(&self, key: &str) -> Option<&str> {
        self.variables.get(key).map(String::as_str)
    }

    fn worker(&self) -> Option<CpuSet> {
        self.variable("UNI_CUMPS_WORKER_CPUS").map(set)
    }

    /// The sizes of the thread pools, by variable.
    fn threads(&self) -> Vec<&str> {
        let of_pools = |(key, value)| is_threads(key).then_some(value);
        let all = self.variables.iter();
        all.map(|(key, value)| (key.as_str(), value.as_str()))
            .filter_map(of_pools)
            .collect()
    }
}

fn is_threads(key: &str) -> bool {
    key.ends_with("_NUM_THREADS")
}

fn seen(call: Call<'_>) -> Seen {
    Seen::of(&call.succeeds().said_nothing().text())
}

/// Whether a GPU of the made-up machine cannot have the two cores that it takes.
#[track_caller]
fn without_two_cores() -> bool {
    let is_small = ours().len() < 2;
    if is_small {
        say("skipped, since it needs two CPUs");
    }
    is_small || without_root()
}

/// A machine with a daemon and a GPU that sits near all CPUs.
fn placed() -> Sandbox {
    let machine = machine();
    for directory in ["cpu", "pci", "driver", "lock"] {
        fs::create_dir(machine.path(directory)).unwrap();
    }
    set_mode(machine.path("lock"), 0o1777);
    let (device, information) = (
        machine.path("pci").join(ADDRESS),
        machine.path("driver/nvidia/gpus").join(ADDRESS),
    );
    fs::create_dir_all(&device).unwrap();
    fs::create_dir_all(&information).unwrap();
    let near = ours().to_string();
    for (file, text) in [
        ("vendor", "0x10de"),
        ("class", "0x030200"),
        ("numa_node", "0"),
        ("local_cpulist", &near),
    ] {
        fs::write(device.join(file), format!("{text}\n")).unwrap();
    }
    let information = information.join("information");
    fs::write(information, format!("GPU UUID: \t {U0}\n")).unwrap();
    machine
}

/// The call in the mount namespace of the machine.
fn inside<'s>(machine: &Sandbox, call: Call<'s>) -> Call<'s> {
    call.under(["/usr/bin/unshare", "-m", "/bin/sh", "-ec", ENTER, "sh"])
        .env("S", machine.path(""))
        .env("PATH", format!("{}:/usr/bin:/bin", machine.bin().display()))
}

fn client<'s>(machine: &'s Sandbox, options: &[&str], line: &str) -> Call<'s> {
    inside(machine, run_sh(machine, options, line))
}

/// What `cpus` says of who has claimed the GPU.
fn claimed_by(machine: &Sandbox) -> String {
    let text = inside(machine, machine.run(["cpus"])).succeeds().text();
    let (_, by) = text.split_once("claimed_by=").unwrap();
    by.lines().next().unwrap().to_owned()
}

fn lock_files(machine: &Sandbox) -> Vec<String> {
    let directory = machine.path("lock/uni-cumps");
    let entries = fs::read_dir(directory).into_iter().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A client that stays until it is ended.
struct Staying(Child);

impl Staying {
    /// Begins one that runs [`STAY`].
    fn begin(machine: &Sandbox, call: Call<'_>, name: &str) -> (Self, Seen) {
        let client = Self(call.env("NAME", name).spawn());
        let file = machine.path(name);
        wait_until("the client runs", || file.exists());
        let seen = Seen::of(&fs::read_to_string(file).unwrap());
        (client, seen)
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }

    fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Staying {
    fn drop(&mut self) {
        self.end();
    }
}

// A list, and off.

#[test]
fn a_program_runs_on_the_cpus_of_the_list_and_nowhere_else() {
    let machine = machine();
    let (first, last) = ends();
    for cpu in [first, last] {
        let list = cpu.to_string();
        let seen = seen(run_sh(&machine, &["--cpus", &list], SHOW));
        assert_eq!(seen.cpus, set(&list));
        assert_eq!(seen.threads(), ["1"; 4], "{seen:?}");
        assert_eq!(seen.variables.len(), 4, "it is told of no GPU: {seen:?}");
    }
    let all = ours().to_string();
    let seen = seen(run_sh(&machine, &["--cpus", &all], SHOW));
    assert_eq!(seen.cpus, ours());
}

#[test]
fn a_program_that_must_become_a_client_is_bound_as_well() {
    let machine = machine();
    let (_, last) = ends();
    let list = last.to_string();
    let line = format!("{SHOW}; exit 4");
    let options = ["--cpus", &list, "--require-mps=1"];
    let done = run_sh(&machine, &options, &line).finish();
    let seen = Seen::of(&done.exited(4).said_nothing().text());
    assert_eq!(seen.cpus, set(&list));
    assert_eq!(seen.threads(), ["1"; 4], "{seen:?}");
}

#[test]
fn off_leaves_everything_as_the_caller_has_it() {
    let machine = machine();
    let (_, last) = ends();
    for options in [
        &["--cpus", "off"][..],
        &["--cpus=off", "--strict-cpus"],
        &[],
    ] {
        let call = run_sh(&machine, options, SHOW);
        let seen = seen(call.under(["/usr/bin/taskset", "-c", &last.to_string()]));
        assert_eq!(seen.cpus, set(&last.to_string()));
        assert!(seen.variables.is_empty(), "{seen:?}");
    }
}

#[test]
fn thread_pools_that_the_caller_has_sized_keep_their_size() {
    let machine = machine();
    let (first, _) = ends();
    let call = run_sh(&machine, &["--cpus", &first.to_string()], SHOW);
    let seen = seen(call.env("OMP_NUM_THREADS", "7").env("MKL_NUM_THREADS", ""));
    assert_eq!(seen.variable("OMP_NUM_THREADS"), Some("7"));
    assert_eq!(seen.variable("MKL_NUM_THREADS"), Some(""));
    assert_eq!(seen.variable("OPENBLAS_NUM_THREADS"), Some("1"));
    assert_eq!(seen.variable("NUMEXPR_NUM_THREADS"), Some("1"));
}

#[test]
fn cores_that_a_bound_caller_was_told_are_not_handed_on() {
    let machine = machine();
    let (first, _) = ends();
    let told = |options: &[&str]| {
        let call = run_sh(&machine, options, SHOW);
        let call = call.env("UNI_CUMPS_WORKER_CPUS", "6,7");
        seen(call.env("UNI_CUMPS_SERVICE_CPU", "5"))
    };
    let bound = told(&["--cpus", &first.to_string()]);
    assert_eq!(bound.variable("UNI_CUMPS_WORKER_CPUS"), Some(""));
    assert_eq!(bound.variable("UNI_CUMPS_SERVICE_CPU"), Some(""));
    let unbound = told(&[]);
    assert_eq!(unbound.variable("UNI_CUMPS_WORKER_CPUS"), Some("6,7"));
    assert_eq!(unbound.variable("UNI_CUMPS_SERVICE_CPU"), Some("5"));
}

#[test]
fn a_daemon_that_is_started_for_the_program_is_not_bound_with_it() {
    let machine = Sandbox::new();
    let (first, _) = ends();
    let options = ["--gpu", "0", "--start", "--cpus", &first.to_string()];
    let done = run_sh(&machine, &options, SHOW).succeeds();
    let program = Seen::of(&done.said("note: started daemon").text());
    assert_eq!(program.cpus, CpuSet::from_iter([first]));
    let daemons = machine.daemons();
    assert_eq!(daemons.len(), 1);
    let status = fs::read_to_string(format!("/proc/{}/status", daemons[0])).unwrap();
    assert_eq!(allowed(&status), ours());
}

#[test]
fn the_mask_is_never_widened() {
    let machine = machine();
    let (first, last) = ends();
    let caller = first.to_string();
    // A CPU that is not there, one that the caller may not use, and one that he may beside one that he may not.
    let others = [
        "60000".to_owned(),
        (last + 1).to_string(),
        format!("{first},{}", last + 1),
        format!("0-{}", last + 1),
    ];
    for list in &others {
        let bound = |options: &[&str]| {
            let options = [&["--cpus", list], options].concat();
            let line = format!("touch $S/ran; {SHOW}");
            let call = run_sh(&machine, &options, &line);
            call.under(["/usr/bin/taskset", "-c", &caller]).finish()
        };
        let done = bound(&[]).exited(0).said(&format!(
            "note: the program is not bound to CPUs: {} is not within the CPUs that this process may use, {caller}\n",
            set(list)
        ));
        let seen = Seen::of(&done.text());
        assert_eq!(seen.cpus, set(&caller));
        assert!(seen.variables.is_empty(), "{seen:?}");
        fs::remove_file(machine.path("ran")).unwrap();
        bound(&["--strict-cpus"])
            .exited(125)
            .printed("")
            .said("error: the program cannot be bound to CPUs\n")
            .said("is not within the CPUs that this process may use")
            .said("hint: ");
        assert!(!machine.path("ran").exists(), "{list}");
    }
}

#[test]
fn a_list_that_is_none_is_not_understood() {
    let machine = machine();
    for list in ["", ",", "near", "0-10:2", "0x3", "5-3", "-1", "all"] {
        let call = machine.run(["run", &format!("--cpus={list}"), "--", "true"]);
        call.breaks_usage()
            .said("it must be auto, node, off or a list of CPUs such as 0-7,16-23");
    }
}

#[test]
fn a_dry_run_shows_how_it_would_be_bound_and_binds_nothing() {
    let machine = machine();
    let (first, _) = ends();
    let list = first.to_string();
    let done = run(&machine, &["--cpus", &list, "--dry-run"], ["echo", "a b"]).succeeds();
    let text = done.said_nothing().text();
    assert!(
        text.ends_with(&format!(" taskset -c {list} echo 'a b'\n")),
        "{text}"
    );
    assert!(text.contains(" OMP_NUM_THREADS=1 "), "{text}");
    // What is shown does what the call would do.
    let shown = run_sh(&machine, &["--cpus", &list, "--dry-run"], SHOW);
    let line = String::from_utf8(shown.succeeds().stdout).unwrap();
    let pasted = machine.run([""; 0]).instead(["/bin/sh", "-c", &line]);
    let seen = seen(pasted.env("PATH", "/usr/bin:/bin"));
    assert_eq!(seen.cpus, set(&list));
}

// Near a GPU.

#[test]
fn the_first_client_of_a_gpu_gets_its_share_and_is_told_its_cores() {
    if without_two_cores() {
        return;
    }
    let machine = placed();
    let (first, last) = ends();
    for options in [&["--cpus", "auto"][..], &["--cpus=auto", "--strict-cpus"]] {
        let seen = seen(client(&machine, options, SHOW));
        assert_eq!(seen.cpus, ours());
        assert_eq!(seen.worker(), Some(CpuSet::from_iter([first])));
        let service = last.to_string();
        assert_eq!(seen.variable("UNI_CUMPS_SERVICE_CPU"), Some(&*service));
        assert_eq!(seen.threads().len(), 4, "{seen:?}");
    }
    let done = client(
        &machine,
        &["--cpus=auto", "--require-mps=1"],
        &format!("{SHOW}; exit 4"),
    );
    let seen = Seen::of(&done.finish().exited(4).said_nothing().text());
    assert_eq!(seen.cpus, ours());
    // Each of them has given the first lock back.
    assert_eq!(lock_files(&machine), [format!("{ADDRESS}.0.lock")]);
    let file = machine
        .path("lock/uni-cumps")
        .join(format!("{ADDRESS}.0.lock"));
    assert_eq!(mode(file), 0o644);
    assert_eq!(
        fs::metadata(machine.path("lock/uni-cumps")).unwrap().mode() & 0o7777,
        0o1777
    );
    assert_eq!(claimed_by(&machine), "nobody");
}

#[test]
fn node_is_every_cpu_near_the_gpu_and_claims_nothing() {
    if without_root() {
        return;
    }
    let machine = placed();
    let (_, last) = ends();
    let near = machine.path("pci").join(ADDRESS).join("local_cpulist");
    fs::write(&near, format!("{last},{}\n", last + 1)).unwrap();
    let seen = seen(client(&machine, &["--cpus", "node", "--strict-cpus"], SHOW));
    assert_eq!(seen.cpus, CpuSet::from_iter([last]));
    assert_eq!(seen.variables.len(), 4, "{seen:?}");
    // No CPU of the node may be used.
    fs::write(&near, format!("{}\n", last + 1)).unwrap();
    let done = client(&machine, &["--cpus", "node"], SHOW).succeeds();
    let done =
        done.said("note: the program is not bound to CPUs: no CPU near GPU GPU-U0 may be used\n");
    assert_eq!(Seen::of(&done.text()).cpus, ours());
    fs::remove_file(&near).unwrap();
    client(&machine, &["--cpus", "node", "--strict-cpus"], SHOW)
        .finish()
        .exited(125)
        .said("it is not known where GPU GPU-U0 sits");
    assert_eq!(lock_files(&machine), [""; 0]);
}

#[test]
fn a_dry_run_claims_nothing() {
    if without_two_cores() {
        return;
    }
    let machine = placed();
    let done = client(&machine, &["--cpus", "auto", "--dry-run"], "true").succeeds();
    let list = ours().to_string();
    let text = done.said_nothing().text();
    assert!(
        text.contains(&format!(" taskset -c {list} /bin/sh -c true")),
        "{text}"
    );
    assert!(!machine.path("lock/uni-cumps").exists());
}

#[test]
fn a_gpu_without_a_place_leaves_the_program_unbound() {
    if without_root() {
        return;
    }
    let machine = placed();
    fs::remove_dir_all(machine.path("pci").join(ADDRESS)).unwrap();
    for choice in ["auto", "node"] {
        let done = client(&machine, &["--cpus", choice], SHOW).succeeds();
        let done = done
            .said("note: the program is not bound to CPUs: it is not known where GPU GPU-U0 sits");
        assert_eq!(Seen::of(&done.text()).cpus, ours());
        client(
            &machine,
            &["--cpus", choice, "--strict-cpus"],
            "touch $S/ran",
        )
        .finish()
        .exited(125)
        .printed("");
    }
    assert!(!machine.path("ran").exists());
}

#[test]
fn nvidia_smi_says_where_a_gpu_sits_if_the_kernel_module_does_not() {
    if without_two_cores() {
        return;
    }
    let machine = placed();
    fs::remove_dir_all(machine.path("driver/nvidia")).unwrap();
    machine.script(
        "nvidia-smi",
        &format!("echo \"$*\" >> ${{0%/*}}/asked; echo '{U0}, 00000000:01:00.0'"),
    );
    let seen = seen(client(&machine, &["--cpus", "auto", "--strict-cpus"], SHOW));
    assert_eq!(seen.cpus, ours());
    assert_eq!(
        fs::read_to_string(machine.bin().join("asked")).unwrap(),
        "--query-gpu=uuid,pci.bus_id --format=csv,noheader\n"
    );
    assert_eq!(lock_files(&machine), [format!("{ADDRESS}.0.lock")]);
}

// Claims.

#[test]
fn two_clients_of_a_gpu_take_different_cores() {
    if without_two_cores() {
        return;
    }
    let machine = placed();
    let auto = || client(&machine, &["--cpus", "auto"], STAY);
    let (first, one) = Staying::begin(&machine, auto(), "one");
    assert_eq!(claimed_by(&machine), first.pid().to_string());
    let (second, two) = Staying::begin(&machine, auto(), "two");
    let reserved = one.worker().unwrap();
    assert!(two.cpus.is_disjoint(&reserved), "{one:?} {two:?}");
    assert_eq!(two.cpus, one.cpus.difference(&reserved));
    assert!(two.worker().is_none_or(|own| own.is_disjoint(&reserved)));
    assert_eq!(
        claimed_by(&machine),
        format!("{},{}", first.pid(), second.pid())
    );
    assert_eq!(
        lock_files(&machine),
        [0, 1].map(|slot| format!("{ADDRESS}.{slot}.lock"))
    );
    // Whoever comes next takes the place of one who has gone.
    first.kill();
    assert_eq!(claimed_by(&machine), second.pid().to_string());
    let (third, three) = Staying::begin(&machine, auto(), "three");
    assert_eq!(three.worker(), Some(reserved));
    assert_eq!(
        claimed_by(&machine),
        format!("{},{}", third.pid(), second.pid())
    );
}

#[test]
fn a_claim_outlives_the_program_with_what_it_leaves_in_the_background() {
    if without_root() {
        return;
    }
    let machine = placed();
    for options in [&["--cpus=auto"][..], &["--cpus=auto", "--require-mps=1"]] {
        let line = "sleep 600 > /dev/null 2>&1 & echo $!; exit 4";
        let done = client(&machine, options, line).finish().exited(4);
        let left: i32 = done.text().trim().parse().unwrap();
        assert_ne!(claimed_by(&machine), "nobody", "{options:?}");
        machine.kill(left);
        assert_eq!(claimed_by(&machine), "nobody", "{options:?}");
    }
}

#[test]
fn a_program_that_cannot_be_run_leaves_no_claim() {
    if without_root() {
        return;
    }
    let machine = placed();
    for options in [&["--cpus=auto"][..], &["--cpus=auto", "--require-mps=1"]] {
        inside(&machine, run(&machine, options, ["/nowhere/program"]))
            .finish()
            .exited(127);
        assert_eq!(claimed_by(&machine), "nobody");
    }
}

#[test]
fn every_user_finds_the_same_locks() {
    if without_two_cores() {
        return;
    }
    let machine = placed();
    let home = home_of(&machine, USER);
    as_user(&machine, &home, machine.run(["start", "--name", "mine"])).succeeds();
    set_mode(machine.path(""), 0o777);
    let of_root = || client(&machine, &["--cpus", "auto"], STAY);
    let of_user = || as_user(&machine, &home, run_sh(&machine, &["--cpus", "auto"], STAY));
    let (first, one) = Staying::begin(&machine, of_root(), "one");
    let (second, two) = Staying::begin(&machine, of_user(), "two");
    assert!(two.cpus.is_disjoint(&one.worker().unwrap()), "{two:?}");
    let expected = format!("{},{}", first.pid(), second.pid());
    assert_eq!(claimed_by(&machine), expected);
    let text = as_user(&machine, &home, machine.run(["cpus"]))
        .succeeds()
        .text();
    assert!(text.contains(&format!("claimed_by={expected}\n")), "{text}");
    // And each may take the lock that the other has made.
    first.kill();
    second.kill();
    let (third, three) = Staying::begin(&machine, of_user(), "three");
    assert_eq!(three.worker(), one.worker());
    let (_fourth, four) = Staying::begin(&machine, of_root(), "four");
    assert!(four.cpus.is_disjoint(&one.worker().unwrap()), "{four:?}");
    third.kill();
}

/// The call of a user with this home, inside.
fn as_user<'s>(machine: &Sandbox, home: &Path, call: Call<'s>) -> Call<'s> {
    inside(machine, call.user(USER).env("HOME", home))
}

#[test]
fn a_lock_file_that_cannot_be_used_is_named_and_waited_for_by_nobody() {
    if without_root() {
        return;
    }
    let machine = placed();
    let lock = format!("lock/uni-cumps/{ADDRESS}.0.lock");
    machine.sh("mkdir -m 1777 lock/uni-cumps; echo precious > victim");
    for (make, why) in [
        ("mkfifo", "it is not a regular file"),
        ("mkdir", "it is not a regular file"),
        ("ln -s $S/victim", "Too many levels of symbolic links"),
    ] {
        machine.sh(&format!("{make} {lock}"));
        let done = client(&machine, &["--cpus", "auto"], SHOW).succeeds();
        let done = done.said("the program is not bound to CPUs: GPU 0000:01:00.0 cannot be claimed: \"/run/lock/uni-cumps/0000:01:00.0.0.lock\": ");
        let done = done.said(why);
        assert_eq!(Seen::of(&done.text()).cpus, ours());
        machine.sh(&format!("rm -r {lock}; grep -q precious victim"));
    }
}

#[test]
fn a_lock_that_its_owner_keeps_to_himself_is_named() {
    if without_root() {
        return;
    }
    let machine = placed();
    let home = home_of(&machine, USER);
    as_user(&machine, &home, machine.run(["start", "--name", "mine"])).succeeds();
    let lock = format!("lock/uni-cumps/{ADDRESS}.0.lock");
    machine.sh(&format!(
        "mkdir -m 1777 lock/uni-cumps; touch {lock}; chmod 600 {lock}"
    ));
    let done: Done<'_> =
        as_user(&machine, &home, run_sh(&machine, &["--cpus", "auto"], SHOW)).succeeds();
    done.said("Permission denied");
    assert_eq!(mode(machine.path(&lock)), 0o600);
}

#[test]
fn a_signal_to_the_program_frees_the_gpu() {
    if without_root() {
        return;
    }
    let machine = placed();
    for options in [&["--cpus=auto"][..], &["--cpus=auto", "--require-mps=60"]] {
        let call = client(&machine, options, STAY);
        let (mut staying, _) = Staying::begin(&machine, call, "one");
        signal(staying.pid(), Signal::SIGTERM);
        staying.0.wait().unwrap();
        assert_eq!(claimed_by(&machine), "nobody", "{options:?}");
        fs::remove_file(machine.path("one")).unwrap();
    }
}
