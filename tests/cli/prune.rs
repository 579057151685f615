//! `prune`: what of the dead goes, and that nothing else does.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::directories::home_of;
use crate::support::{
    N0, Sandbox, Sleeper, freeze, is_running, our_uid, pid, signal, without_root,
};

const NOTHING: &str = "nothing to remove\n";
const USER: u32 = 1000;
const STRANGER: u32 = 65534;

/// Every path below HOME and TMPDIR with its kind, mode, owner, size and the times of its last change.
fn everything(machine: &Sandbox) -> String {
    machine.sh("find h t -printf '%p %y %m %U %s %T@ %C@ %l\\n' | sort")
}

/// Starts a daemon and ends it without a word, which leaves all of its files.
fn killed(machine: &Sandbox, args: &[&str]) -> Value {
    let record = machine.start(args);
    machine.kill(pid(&record));
    record
}

/// A record as this version writes it, of a process that has long gone.
fn of_nobody(machine: &Sandbox, name: &str) -> Value {
    let mut record = machine.reference_record(name, 4_000_000);
    record["boot_id"] = read("/proc/sys/kernel/random/boot_id").trim().into();
    record["process_start_ticks"] = 1.into();
    record
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap()
}

/// Turns the record of a daemon into the intent of a start that was killed at this moment.
fn interrupt(machine: &Sandbox, name: &str) {
    let file = machine.record_file(name);
    let mut intent: Value = serde_json::from_str(&read(&file)).unwrap();
    intent["pid"] = 4_000_000.into();
    fs::write(file.with_file_name("starting.json"), intent.to_string()).unwrap();
    fs::remove_file(file).unwrap();
}

/// Makes a default runtime directory as a daemon that is gone leaves it.
fn old_runtime(machine: &Sandbox, name: &str) -> PathBuf {
    let own = machine.runtime().join(name);
    fs::create_dir_all(own.join("log")).unwrap();
    fs::write(own.join("log/control.log"), "old\n").unwrap();
    fs::write(own.join("log/server.log"), "old\n").unwrap();
    own
}

/// The directories of replaced records, the oldest first.
fn replaced(machine: &Sandbox) -> Vec<PathBuf> {
    let entries = fs::read_dir(machine.records().join(".stale"));
    let mut found: Vec<PathBuf> = entries
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path())
        .collect();
    found.sort();
    found
}

/// What `prune --json` with these options says that it removes, as `kind path`.
fn removals(machine: &Sandbox, dry_run: bool) -> Vec<String> {
    let options = dry_run.then_some("--dry-run");
    let call = machine.run(["prune", "--json"].into_iter().chain(options));
    let report = call.succeeds().said_nothing().json();
    assert_eq!(report["dry_run"], dry_run);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let list = report["removed"].as_array().unwrap();
    list.iter()
        .map(|one| machine.normal(&format!("{} {}", text(&one["kind"]), text(&one["path"]))))
        .collect()
}

#[track_caller]
fn finds_nothing(machine: &Sandbox) {
    let before = everything(machine);
    machine
        .run(["prune", "--dry-run"])
        .prints(NOTHING)
        .said_nothing();
    machine.run(["prune"]).prints(NOTHING).said_nothing();
    assert_eq!(everything(machine), before);
}

#[test]
fn where_nothing_was_there_is_nothing_to_remove_and_nothing_is_made() {
    let machine = Sandbox::new();
    finds_nothing(&machine);
    machine
        .run(["prune", "--json"])
        .prints("{\n  \"dry_run\": false,\n  \"removed\": []\n}\n")
        .said_nothing();
    assert_eq!(machine.sh("find h t -mindepth 1"), "");
    assert_eq!(machine.calls(), "", "no program is called");
}

/// A machine with something of every kind that goes and of every kind that stays.
fn after_a_long_time() -> Sandbox {
    let machine = Sandbox::with_gpus(4);
    machine.start(&["--gpus", "0", "--name", "live"]);
    killed(&machine, &["--gpus", "1", "--name", "dead"]);
    killed(&machine, &["--gpus", "2", "--name", "again"]);
    machine.start(&["--gpus", "2", "--name", "again"]);
    machine.run(["stop", "--name", "again"]).succeeds();
    killed(&machine, &["--gpus", "3", "--name", "cut"]);
    interrupt(&machine, "cut");
    let mut rebooted = of_nobody(&machine, "rebooted");
    rebooted["boot_id"] = "00000000-0000-4000-8000-000000000000".into();
    machine.write_record("rebooted", &rebooted);
    let mut away = of_nobody(&machine, "away");
    away["host"] = "node-of-another-rack".into();
    away["boot_id"] = rebooted["boot_id"].clone();
    machine.write_record("away", &away);
    let mut theirs = of_nobody(&machine, "theirs");
    theirs["uid"] = 12345.into();
    machine.write_record("theirs", &theirs);
    fs::create_dir(machine.records().join("broken")).unwrap();
    fs::write(machine.record_file("broken"), "{").unwrap();
    for name in ["away", "broken", "orphan", "theirs"] {
        old_runtime(&machine, name);
    }
    machine.calls();
    machine
}

/// What goes of `after_a_long_time`.
fn what_goes(machine: &Sandbox) -> [String; 8] {
    let [quarantined] = &replaced(machine)[..] else {
        panic!("one record was replaced");
    };
    let quarantined = quarantined.file_name().unwrap().to_str().unwrap();
    let records = "<S>/h/.cache/unilab/cuda-mps";
    [
        format!("record {records}/cut"),
        format!("record {records}/dead"),
        format!("record {records}/rebooted"),
        format!("replaced record {records}/.stale/{quarantined}"),
        "runtime directory <S>/t/uni-cumps/again".to_owned(),
        "runtime directory <S>/t/uni-cumps/cut".to_owned(),
        "runtime directory <S>/t/uni-cumps/dead".to_owned(),
        "runtime directory <S>/t/uni-cumps/orphan".to_owned(),
    ]
}

/// The lines that plain output has for these removals.
fn lines(verb: &str, removals: &[String]) -> String {
    let line = |removal: &String| {
        let (kind, path) = removal.split_once(" <S>").unwrap();
        format!("{verb} {kind}: <S>{path}\n")
    };
    removals.iter().map(line).collect()
}

#[test]
fn what_the_dead_have_left_goes_and_the_rest_stays() {
    let machine = after_a_long_time();
    let goes = what_goes(&machine);
    let stays = ["away", "broken", "live", "theirs"];
    let before = stays.map(|name| read(machine.record_file(name)));
    machine
        .run(["prune"])
        .prints(&lines("removed", &goes))
        .said_nothing();
    for removal in &goes {
        let path = removal.split_once("<S>/").unwrap().1;
        assert!(!machine.path(path).exists(), "{removal}");
    }
    assert_eq!(stays.map(|name| read(machine.record_file(name))), before);
    assert_eq!(
        machine.sh("ls $REC; ls $RT"),
        "away\nbroken\nlive\ntheirs\naway\nbroken\nlive\ntheirs\n"
    );
    for name in ["away", "broken", "theirs"] {
        let log = machine.runtime().join(name).join("log");
        assert_eq!(read(log.join("control.log")), "old\n", "{name}");
        assert_eq!(read(log.join("server.log")), "old\n", "{name}");
    }
    assert_eq!(machine.calls(), "", "no program is called");
    assert_eq!(machine.daemons().len(), 1);
    machine.run(["env", "--name", "live"]).succeeds();
    machine
        .run(["doctor", "--gpus", "0"])
        .succeeds()
        .said_nothing();
    finds_nothing(&machine);
}

#[test]
fn a_dry_run_names_the_same_and_changes_nothing() {
    let machine = after_a_long_time();
    let goes = what_goes(&machine);
    let before = everything(&machine);
    for _ in 0..2 {
        machine
            .run(["prune", "--dry-run"])
            .prints(&lines("would remove", &goes))
            .said_nothing();
        assert_eq!(removals(&machine, true), goes);
    }
    assert_eq!(everything(&machine), before);
    assert_eq!(machine.calls(), "");
    assert_eq!(removals(&machine, false), goes);
    assert_eq!(removals(&machine, false), Vec::<String>::new());
    assert_eq!(removals(&machine, true), Vec::<String>::new());
}

#[test]
fn files_of_somebody_else_stay_where_they_are() {
    let machine = Sandbox::new();
    killed(&machine, &["--name", "a"]);
    killed(&machine, &["--name", "a"]);
    let quarantined = replaced(&machine).remove(0);
    let own = machine.runtime().join("a");
    let directories = [
        machine.records().join("a"),
        quarantined,
        own.clone(),
        own.join("log"),
        own.join("pipe"),
    ];
    for directory in &directories {
        fs::write(directory.join("notes.txt"), "mine").unwrap();
    }
    let foretold = removals(&machine, true);
    let removed = removals(&machine, false);
    for directory in &directories {
        assert_eq!(read(directory.join("notes.txt")), "mine");
    }
    assert!(!machine.record_file("a").exists());
    finds_nothing(&machine);
    assert_eq!(foretold, removed);
}

#[test]
fn files_that_were_being_written_go() {
    let machine = Sandbox::new();
    killed(&machine, &["--name", "a"]);
    killed(&machine, &["--name", "a"]);
    let quarantined = replaced(&machine).remove(0);
    fs::write(machine.records().join("a/.aside-x1"), "{").unwrap();
    fs::write(quarantined.join(".aside-x2"), "{").unwrap();
    machine.run(["prune"]).succeeds();
    assert!(!machine.records().join("a").exists());
    assert!(!quarantined.exists());
}

/// A start that is killed before its first file has its name leaves just this.
#[test]
fn a_directory_with_nothing_but_a_file_that_was_being_written_goes() {
    let machine = Sandbox::new();
    for name in ["a", "b"] {
        fs::create_dir_all(machine.records().join(name)).unwrap();
    }
    fs::write(machine.records().join("a/.aside-x1"), "{").unwrap();
    machine.run(["prune"]).succeeds();
    assert_eq!(machine.sh("ls $REC"), "");
}

#[test]
fn what_daemons_leave_in_given_directories_goes_and_the_directories_stay() {
    let machine = Sandbox::new();
    killed(&machine, &["--name", "a", "--pipe-dir=p", "--log-dir=l"]);
    assert!(machine.path("p/control").exists());
    assert_eq!(
        removals(&machine, false),
        ["record <S>/h/.cache/unilab/cuda-mps/a"]
    );
    assert_eq!(machine.sh("ls p"), "");
    assert_eq!(machine.sh("ls l"), "control.log\n");
}

// What may still run.

#[test]
fn a_daemon_that_is_frozen_or_out_of_reach_is_not_gone() {
    let machine = Sandbox::with_gpus(2);
    let frozen = machine.start(&["--gpus", "0", "--name", "frozen"]);
    let unreachable = machine.start(&["--gpus", "1", "--name", "unreachable"]);
    freeze(pid(&frozen));
    machine.sh("rm $RT/unreachable/pipe/control $RT/unreachable/pipe/control_lock");
    finds_nothing(&machine);
    assert!(is_running(pid(&frozen)) && is_running(pid(&unreachable)));
    signal(pid(&frozen), nix::sys::signal::Signal::SIGCONT);
    machine.run(["stop", "--all"]).succeeds();
    machine.has_no_daemon();
}

#[test]
fn a_daemon_whose_record_was_lost_keeps_its_directories() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine.sh("rm -r $REC; mkdir -p -m 700 $REC");
    finds_nothing(&machine);
    assert_eq!(machine.start(&[])["pid"], record["pid"]);
}

#[test]
fn what_an_interrupted_start_has_left_running_stays() {
    let machine = Sandbox::new();
    let record = machine.start(&["--name", "a"]);
    interrupt(&machine, "a");
    finds_nothing(&machine);
    assert_eq!(machine.daemons(), [pid(&record)]);
    machine.run(["stop", "--name", "a"]).succeeds();
    machine.has_no_daemon();
}

#[test]
fn the_intent_of_another_user_or_machine_stays() {
    let machine = Sandbox::new();
    for (key, value) in [("uid", Value::from(12345)), ("host", Value::from("away"))] {
        let mut record = of_nobody(&machine, key);
        record[key] = value;
        record["boot_id"] = "00000000-0000-4000-8000-000000000000".into();
        machine.write_record(key, &record);
        interrupt(&machine, key);
    }
    let before = machine.sh("cat $REC/uid/starting.json $REC/host/starting.json");
    machine.run(["prune", "--dry-run"]).prints(NOTHING);
    machine.run(["prune"]).prints(NOTHING).said_nothing();
    assert_eq!(
        machine.sh("cat $REC/uid/starting.json $REC/host/starting.json"),
        before
    );
}

#[test]
fn a_start_that_is_at_work_is_not_disturbed() {
    let machine = Sandbox::new();
    machine.conduct("launch hang");
    let mut start = machine.run(["start", "--name", "a"]).spawn();
    let intent = machine.record_file("a").with_file_name("starting.json");
    crate::support::wait_until("the intent is written", || intent.exists());
    let before = read(&intent);
    machine.run(["prune", "--dry-run"]).prints(NOTHING);
    assert_eq!(read(&intent), before);
    assert!(start.try_wait().unwrap().is_none(), "it still works");
    start.kill().unwrap();
    start.wait().unwrap();
}

#[test]
fn a_daemon_of_another_pid_namespace_stays() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    let before = everything(&machine);
    let elsewhere = ["/usr/bin/unshare", "-pf", "--mount-proc"];
    for home in ["h", "other-home"] {
        machine
            .run(["prune"])
            .under(elsewhere)
            .env("HOME", machine.path(home))
            .prints(NOTHING);
    }
    assert_eq!(everything(&machine), before);
    assert_eq!(machine.daemons(), [pid(&record)]);
    machine.run(["env"]).succeeds();
}

#[test]
fn daemons_that_another_home_records_keep_their_directories() {
    let machine = Sandbox::with_gpus(2);
    let default = machine.start(&["--gpus", "0", "--name", "a"]);
    let pipe = machine.path("p");
    let given = ["--gpus", "1", "--name", "b", "--pipe-dir"];
    let given = machine.start(&[&given[..], &[pipe.to_str().unwrap()]].concat());
    let before = everything(&machine);
    let other = machine.path("other-home");
    let pruned = machine.run(["prune"]).env("HOME", &other).succeeds();
    assert_eq!(everything(&machine), before, "{pruned:?}");
    assert_eq!(pruned.text(), NOTHING);
    let mut daemons = machine.daemons();
    daemons.sort_unstable();
    let mut expected = [pid(&default), pid(&given)];
    expected.sort_unstable();
    assert_eq!(daemons, expected);
}

#[test]
fn the_process_that_has_the_number_of_a_dead_daemon_lives_on() {
    let machine = Sandbox::new();
    let other = Sleeper::new();
    let mut recycled = machine.reference_record("a", other.pid());
    recycled["process_start_ticks"] = 1.into();
    machine.write_record("a", &recycled);
    let mut rebooted = machine.reference_record("b", other.pid());
    rebooted["boot_id"] = "00000000-0000-4000-8000-000000000000".into();
    machine.write_record("b", &rebooted);
    assert_eq!(removals(&machine, false).len(), 2);
    assert!(is_running(other.pid()));
    finds_nothing(&machine);
}

// The quarantine.

#[test]
fn the_quarantine_holds_the_last_eight() {
    let machine = Sandbox::new();
    let mut dead = Vec::new();
    for _ in 0..10 {
        dead.push(killed(&machine, &[]));
    }
    let last = machine.start(&[]);
    let kept: Vec<Value> = replaced(&machine)
        .into_iter()
        .map(|directory| serde_json::from_str(&read(directory.join("daemon.json"))).unwrap())
        .collect();
    assert_eq!(kept, dead[2..]);
    assert_eq!(machine.daemons(), [pid(&last)]);
    let foretold = removals(&machine, true);
    assert_eq!(foretold.len(), 8);
    assert!(
        foretold
            .iter()
            .all(|one| one.starts_with("replaced record "))
    );
    assert_eq!(removals(&machine, false), foretold);
    assert_eq!(replaced(&machine), Vec::<PathBuf>::new());
    machine.run(["env"]).succeeds();
}

// Other users, and what cannot be removed.

#[test]
fn a_record_that_cannot_be_removed_hides_no_other() {
    if without_root() {
        return;
    }
    let machine = Sandbox::with_gpus(2);
    let home = home_of(&machine, USER);
    let call = |args: &[&str]| machine.run(args).user(USER).env("HOME", &home);
    for (gpu, name) in [("0", "a"), ("1", "b")] {
        let record = call(&["start", "--gpus", gpu, "--name", name]).succeeds();
        machine.kill(pid(&record.json()));
    }
    let records = home.join(".cache/unilab/cuda-mps");
    crate::support::set_mode(records.join("a"), 0o500);
    let done = call(&["prune"]).finish().exited(1).said("cuda-mps/a");
    assert!(
        done.text()
            .contains("removed record: <S>/h1000/.cache/unilab/cuda-mps/b\n"),
        "{done:?}"
    );
    assert!(records.join("a/daemon.json").exists());
    assert!(!records.join("b").exists());
}

#[test]
fn root_in_the_home_of_a_user_removes_nothing_of_his() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = home_of(&machine, USER);
    let call = |args: &[&str]| machine.run(args).user(USER).env("HOME", &home);
    for _ in 0..2 {
        let record = call(&["start"]).succeeds();
        machine.kill(pid(&record.json()));
    }
    let listing = "find h1000 t -printf '%p %y %m %U %s %T@ %C@\\n' | sort";
    let before = machine.sh(listing);
    machine.run(["prune"]).env("HOME", &home).prints(NOTHING);
    assert_eq!(machine.sh(listing), before);
    let text = call(&["prune"]).succeeds().text();
    assert_eq!(text.matches("removed ").count(), 3, "{text}");
}

#[test]
fn directories_below_the_second_parent_go_as_well_and_those_of_others_stay() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    machine.sh(&format!(
        "mkdir -p $RT/theirs/log; touch $RT/theirs/log/control.log; chown -R {STRANGER} $RT"
    ));
    machine.start(&["--name", "a"]);
    machine.run(["stop"]).succeeds();
    assert_eq!(
        removals(&machine, false),
        [format!("runtime directory <S>/t/uni-cumps-{}/a", our_uid())]
    );
    assert!(machine.runtime().join("theirs/log/control.log").exists());
}

#[test]
fn links_are_not_followed() {
    for link in ["ln -s $S/v $RT/a", "ln -s $S/v/a-1 $REC/.stale/b-1"] {
        let machine = Sandbox::new();
        // What would go if a link led to it.
        machine.sh("mkdir -p v/a-1 v/log v/pipe $REC/.stale $RT
             echo x > v/a-1/daemon.json; echo x > v/log/control.log");
        machine.sh(link);
        let listing = "find v -printf '%p %y %m %s %T@ %C@\\n' | sort";
        let before = machine.sh(listing);
        machine.run(["prune"]).prints(NOTHING);
        assert_eq!(machine.sh(listing), before, "{link}");
        machine.run(["prune", "--dry-run"]).prints(NOTHING);
    }
}

#[test]
fn a_record_directory_that_is_a_link_stays_and_hides_no_other() {
    let machine = Sandbox::with_gpus(2);
    for (gpu, name) in [("0", "a"), ("1", "b")] {
        killed(&machine, &["--gpus", gpu, "--name", name]);
    }
    machine.sh("mv $REC/a v; ln -s $S/v $REC/a");
    let done = machine.run(["prune"]).finish();
    assert!(machine.path("v/daemon.json").exists());
    assert!(!machine.record_file("b").exists(), "{done:?}");
    assert!(done.text().contains("cuda-mps/b\n"), "{done:?}");
}

#[test]
fn a_daemon_with_the_default_name_is_started_again_after_prune() {
    let machine = Sandbox::new();
    killed(&machine, &[]);
    assert_eq!(removals(&machine, false).len(), 2);
    assert!(!machine.runtime().join(N0).exists());
    let record = machine.start(&[]);
    assert_eq!(machine.daemons(), [pid(&record)]);
    assert_eq!(replaced(&machine), Vec::<PathBuf>::new());
}

#[test]
fn prune_takes_no_name() {
    let machine = Sandbox::new();
    killed(&machine, &["--name", "a"]);
    for option in ["a", "--name=a", "--all", "--force"] {
        machine.run(["prune", option]).breaks_usage();
    }
    assert!(machine.record_file("a").exists());
}
