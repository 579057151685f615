//! Two users on one machine with one sticky TMPDIR: the second can neither stop, read, redirect nor block the daemon of
//! the first, and has his own beside it. The first is root in one round and an ordinary user in the other.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::support::{Call, Done, Sandbox, Sleeper, is_running, pid, set_mode, without_root};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    ("nobody_else_stops_a_daemon", stopping),
    ("nobody_else_reads_anything_of_a_daemon", reading),
    ("nobody_else_moves_a_daemon_that_runs", moving),
    ("nothing_that_was_planted_is_followed", planting),
    ("directories_that_were_open_are_not_trusted", left_open),
    (
        "where_everybody_may_replace_the_default_no_daemon_is_put",
        without_sticky_bit,
    ),
    ("nobody_else_blocks_a_start", squatting),
    ("locks_of_somebody_else_hold_nobody_up", holding_locks),
    ("two_users_have_a_daemon_each", side_by_side),
    (
        "an_open_pipe_directory_lets_others_ask_and_not_quit",
        open_pipe_directory,
    ),
    (
        "a_daemon_that_cannot_write_its_log_is_not_started_silently",
        without_log,
    ),
    ("one_sudo_run_does_not_lock_the_user_out", after_sudo),
    ("root_follows_no_link_in_the_home_of_a_user", sudo_and_links),
    (
        "a_record_that_somebody_else_wrote_leads_nobody_astray",
        open_records,
    ),
    (
        "records_in_the_home_of_a_user_are_not_roots",
        records_of_a_user,
    ),
];

const FIRST: [u32; 2] = [0, 1000];
const SECOND: u32 = 65534;

/// Somebody with a home of his own.
struct User<'m> {
    machine: &'m Sandbox,
    uid: u32,
    home: PathBuf,
}

impl<'m> User<'m> {
    fn new(machine: &'m Sandbox, uid: u32) -> Self {
        let home = machine.path(format!("h{uid}"));
        fs::create_dir(&home).unwrap();
        chown(&home, Some(uid), Some(uid)).unwrap();
        Self { machine, uid, home }
    }

    fn call(&self, args: &[&str]) -> Call<'m> {
        self.machine
            .run(args)
            .user(self.uid)
            .env("HOME", &self.home)
    }

    /// `sudo uni-cumps …` where sudo keeps HOME.
    fn sudo(&self, args: &[&str]) -> Call<'m> {
        self.machine.run(args).env("HOME", &self.home)
    }

    fn shell(&self, line: &str) -> Command {
        let mut command = Command::new("/usr/bin/setpriv");
        command
            .arg(format!("--reuid={0}", self.uid))
            .arg(format!("--regid={0}", self.uid))
            .args(["--clear-groups", "/bin/bash", "-ec", line])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("S", self.machine.path(""))
            .env("RT", self.machine.runtime())
            .env(
                "CONTROL",
                self.machine.bin().join("nvidia-cuda-mps-control"),
            )
            .current_dir(&self.home)
            .stdin(Stdio::null());
        command
    }

    /// Whether a shell line of his succeeds.
    fn can(&self, line: &str) -> bool {
        self.shell(line).output().unwrap().status.success()
    }

    #[track_caller]
    fn does(&self, line: &str) {
        let output = self.shell(line).output().unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
    }

    /// Starts his daemon `a`.
    fn starts(&self) -> Value {
        self.call(&["start", "--name", "a"]).succeeds().json()
    }

    /// This daemon of his answers, and his programs find it.
    #[track_caller]
    fn is_served_by(&self, daemon: &Value) {
        let report = self.call(&["doctor", "--json"]).succeeds().json();
        assert_eq!(report["valid"], true);
        assert_eq!(report["cuda_process_sharing"]["control_pid"], daemon["pid"]);
        let env = self.call(&["env", "--json"]).succeeds().json();
        let pipe = &env["env"]["CUDA_MPS_PIPE_DIRECTORY"];
        assert_eq!(*pipe, daemon["pipe_directory"]);
    }

    fn records(&self) -> PathBuf {
        self.home.join(".cache/unilab/cuda-mps")
    }
}

/// Makes a machine for each kind of first user and hands it over with both users.
fn rounds(driver: &Driver, test: impl Fn(&Sandbox, &User<'_>, &User<'_>)) {
    for uid in FIRST {
        let machine = driver.machine();
        let first = User::new(&machine, uid);
        let second = User::new(&machine, SECOND);
        test(&machine, &first, &second);
    }
}

/// The directory of a path in a record.
fn place<'r>(record: &'r Value, key: &str) -> &'r Path {
    Path::new(record[key].as_str().unwrap())
}

/// The record's directories are where `uid` alone has a say: up to TMPDIR or HOME, real directories of his, and closed
/// to others.
#[track_caller]
fn are_private(machine: &Sandbox, record: &Value, uid: u32) {
    for key in ["pipe_directory", "log_directory"] {
        let directory = place(record, key);
        assert_eq!(fs::canonicalize(directory).unwrap(), directory);
        let above = [machine.path("t"), machine.path(format!("h{uid}"))];
        let ours = directory
            .ancestors()
            .take_while(|path| !above.iter().any(|end| end == path));
        for path in ours {
            let meta = fs::symlink_metadata(path).unwrap();
            assert_eq!((meta.uid(), meta.mode() & 0o7777), (uid, 0o700), "{path:?}");
        }
    }
}

// What he tries while the daemon runs.

fn stopping(driver: &Driver) {
    if without_root() {
        return;
    }
    rounds(driver, |machine, first, second| {
        let daemon = first.starts();
        second.call(&["stop"]).fails("no recorded daemon is live");
        second
            .call(&["stop", "--name", "a", "--force"])
            .fails("no daemon named a is recorded");
        second.call(&["stop", "--all"]).succeeds();
        second.call(&["prune"]).prints("nothing to remove\n");
        for args in [
            &["stop"][..],
            &["stop", "--name=a"],
            &["stop", "--all", "--force"],
        ] {
            let stop = second.call(args).env("HOME", &first.home);
            stop.finish().exited(1);
        }
        let pipe = place(&daemon, "pipe_directory").display();
        for session in ["quit", "quit -t 0", "start_server -uid 65534"] {
            let line = format!("echo {session} | CUDA_MPS_PIPE_DIRECTORY={pipe} $CONTROL");
            assert!(!second.can(&line), "{line}");
        }
        for signal in ["TERM", "KILL", "STOP", "INT", "HUP"] {
            let line = format!("kill -{signal} {}", pid(&daemon));
            assert!(!second.can(&line), "{line}");
        }
        // A record of his own that tells of the other's daemon.
        let mut lie = daemon.clone();
        for uid in [first.uid, second.uid] {
            lie["uid"] = uid.into();
            write_record(&second.records(), "a", &lie, second.uid);
            second
                .call(&["stop", "--name", "a", "--force"])
                .finish()
                .exited(1);
        }
        first.is_served_by(&daemon);
        assert_eq!(machine.daemons(), [pid(&daemon)]);
        first.call(&["stop"]).succeeds();
        machine.has_no_daemon();
    });
}

/// Writes a record by the hand of `owner`.
fn write_record(records: &Path, name: &str, record: &Value, owner: u32) {
    let directory = records.join(name);
    let file = directory.join("daemon.json");
    fs::create_dir_all(&directory).unwrap();
    fs::write(&file, record.to_string()).unwrap();
    for path in [&file, &directory] {
        chown(path, Some(owner), Some(owner)).unwrap();
    }
    for path in records.ancestors().take(3) {
        if fs::metadata(path).unwrap().uid() == 0 {
            chown(path, Some(owner), Some(owner)).unwrap();
        }
    }
}

fn reading(driver: &Driver) {
    if without_root() {
        return;
    }
    rounds(driver, |machine, first, second| {
        for given in [false, true] {
            let mut start = first.call(&["start", "--name", "a"]);
            if given {
                let (pipe, log) = (first.home.join("p"), first.home.join("l"));
                start = start.and("--pipe-dir").and(pipe).and("--log-dir").and(log);
            }
            // Neither the shell's umask nor an open home opens anything.
            let record = start
                .under(["/bin/sh", "-c", "umask 000; exec \"$@\"", "sh"])
                .succeeds()
                .json();
            let pipe = place(&record, "pipe_directory");
            let log = place(&record, "log_directory");
            let records = first.records();
            for directory in [pipe, log, &records, &records.join("a")] {
                for line in ["ls", "cd", "touch -c"] {
                    let line = format!("{line} {}/", directory.display());
                    assert!(!second.can(&line), "{line}");
                }
            }
            let process = PathBuf::from(format!("/proc/{}", pid(&record)));
            for file in [
                &records.join("a/daemon.json"),
                &records.join(".lock"),
                &log.join("control.log"),
                &log.join("server.log"),
                &pipe.join("control_lock"),
                &process.join("environ"),
            ] {
                assert!(file.exists(), "{file:?}");
                let line = format!("cat {}", file.display());
                assert!(!second.can(&line), "{line}");
            }
            let line = format!(
                "echo get_server_list | CUDA_MPS_PIPE_DIRECTORY={} $CONTROL",
                pipe.display()
            );
            assert!(first.can(&line) && !second.can(&line), "{line}");
            let report = second
                .call(&["doctor"])
                .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
                .finish()
                .exited(1)
                .text();
            assert!(report.contains("Permission denied"), "{report}");
            let status = second
                .call(&["status"])
                .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
                .succeeds()
                .text();
            assert!(status.contains("managed_daemons=none"), "{status}");
            assert!(
                !status.contains(&format!("pid={}", pid(&record))),
                "{status}"
            );
            first.is_served_by(&record);
            first.call(&["stop"]).succeeds();
        }
        machine.has_no_daemon();
    });
}

fn moving(driver: &Driver) {
    if without_root() {
        return;
    }
    for prepare in ["true", "mkdir $RT"] {
        rounds(driver, |machine, first, second| {
            second.does(prepare);
            let daemon = first.starts();
            let own = place(&daemon, "pipe_directory").parent().unwrap();
            let parent = own.parent().unwrap().display().to_string();
            for line in [
                format!("mv {parent} $S/t/away"),
                format!("rm -rf {parent}"),
                format!("rmdir {parent}"),
                format!("ln -sfn $S {parent}"),
                format!("ln -s $S {parent}/b"),
                format!("mkdir {parent}/b"),
                format!("touch {parent}/a/pipe/control"),
                format!("chmod 777 {parent}"),
            ] {
                second.can(&line);
            }
            are_private(machine, &daemon, first.uid);
            assert_eq!(fs::read_dir(&parent).unwrap().count(), 1);
            // What he may do: make things of his own beside it, and take them away again.
            second.can("rm -rf $RT");
            second.can("mkdir $RT-0 $RT-1000 $RT");
            first.is_served_by(&daemon);
            first
                .call(&["start", "--name", "a"])
                .fails("daemon a is already live");
            first.call(&["stop"]).succeeds();
            machine.has_no_daemon();
        });
    }
}

// What he prepares before the daemon comes.

/// What is not the first user's: all that the second owns, and `victim`, in every detail.
fn foreign(machine: &Sandbox) -> String {
    machine.sh(
        "find t h65534 victim \\( -user 65534 -o -path 'victim*' \\) -printf '%p %y %m %U:%G %s %T@ %C@ %l\\n' | sort",
    )
}

/// A directory of this user's that a link may lead to. It has what a runtime and a record directory have.
fn make_victim(machine: &Sandbox, uid: u32) {
    machine.sh(&format!(
        "mkdir -p victim/a/pipe victim/a/log victim/a-1; echo data >victim/data; echo data >victim/a/log/control.log
         chmod -R 755 victim; chown -R {uid}:{uid} victim"
    ));
}

/// Commands of the first user neither change nor take over anything foreign, whatever they come to.
#[track_caller]
fn leaves_the_foreign_alone(machine: &Sandbox, first: &User<'_>, plant: &str) {
    let before = foreign(machine);
    let started = first.call(&["start", "--name", "a"]).finish();
    assert_eq!(foreign(machine), before, "{plant}: {started:?}");
    if started.code == 0 {
        let record = started.json();
        are_private(machine, &record, first.uid);
        first.is_served_by(&record);
    } else {
        let refused = started.exited(1).printed("");
        assert!(refused.stderr.contains("uid 65534"), "{plant}: {refused:?}");
        machine.has_no_daemon();
        assert!(!first.records().join("a").exists());
        // As the hint says.
        let (pipe, log) = (first.home.join("p"), first.home.join("l"));
        let start = first.call(&["start", "--name", "a"]);
        let start = start.and("--pipe-dir").and(pipe).and("--log-dir").and(log);
        let record = start.succeeds().json();
        first.is_served_by(&record);
    }
    first.call(&["stop"]).succeeds();
    first.call(&["prune"]).succeeds();
    machine.has_no_daemon();
    assert_eq!(foreign(machine), before, "{plant}");
}

fn planting(driver: &Driver) {
    if without_root() {
        return;
    }
    let shared = [
        "ln -s $S/victim $RT",
        "ln -s nowhere $RT",
        "mkfifo $RT",
        "touch $RT",
        "mkdir -m 777 $RT; ln -s $S/victim/a $RT/a",
        "mkdir -m 777 $RT; ln -s nowhere $RT/a",
        "mkdir -m 777 -p $RT/a; ln -s $S/victim/a/pipe $RT/a/pipe; ln -s $S/victim/a/log $RT/a/log",
        "mkdir -m 777 -p $RT/a/log; ln -s $S/victim/data $RT/a/log/control.log",
        "mkdir -m 777 -p $RT/a/pipe; ln -s $S/victim/data $RT/a/pipe/control_lock",
        "mkdir -m 777 -p $RT/a/pipe; mkfifo $RT/a/pipe/log $RT/a/pipe/control",
    ];
    let own = [
        "mkdir $OWN",
        "ln -s $S/victim $OWN",
        "mkdir -m 777 $OWN; ln -s $S/victim/a $OWN/a",
        "mkdir -m 777 -p $OWN/a/log $OWN/a/pipe; ln -s $S/victim/data $OWN/a/log/control.log",
        "mkfifo $OWN",
    ];
    for uid in FIRST {
        let own = own.map(|line| line.replace("$OWN", &format!("$RT-{uid}")));
        let alone = shared.iter().map(|line| (*line).to_owned());
        let both = own.iter().map(|line| format!("mkdir $RT; {line}"));
        for plant in alone.chain(own.clone()).chain(both) {
            let machine = driver.machine();
            let first = User::new(&machine, uid);
            let second = User::new(&machine, SECOND);
            make_victim(&machine, uid);
            second.does(&plant);
            leaves_the_foreign_alone(&machine, &first, &plant);
        }
    }
}

/// The first user's own directories, made under an open umask, in which the second has put something.
fn left_open(driver: &Driver) {
    if without_root() {
        return;
    }
    for plant in [
        "ln -s $S/victim $RT/a",
        "mkdir $RT/a",
        "mkdir -p $RT/a/pipe $RT/a/log",
    ] {
        rounds(driver, |machine, first, second| {
            make_victim(machine, first.uid);
            first.does("mkdir $RT; chmod 777 $RT");
            second.does(plant);
            leaves_the_foreign_alone(machine, first, plant);
        });
    }
    for plant in [
        "ln -s $S/victim/data $RT/a/log/control.log",
        "ln -s $S/victim/data $RT/a/log/server.log",
        "ln -s $S/victim/data $RT/a/pipe/control_lock",
        "ln -s $S/victim/data $RT/a/pipe/nvidia-cuda-mps-control.pid",
        "ln -s $S/victim/data $RT/a/pipe/control",
        "mkfifo $RT/a/pipe/log",
    ] {
        rounds(driver, |machine, first, second| {
            make_victim(machine, first.uid);
            first.does("mkdir -p $RT/a/pipe $RT/a/log; chmod -R 777 $RT");
            second.does(plant);
            let before = machine.sh("cat victim/data; stat -c '%a %u %Y %s' victim/data");
            let started = first.call(&["start", "--name", "a"]).finish();
            assert_eq!(
                machine.sh("cat victim/data; stat -c '%a %u %Y %s' victim/data"),
                before,
                "{plant}: {started:?}"
            );
            if started.code == 0 {
                let record = started.json();
                are_private(machine, &record, first.uid);
                let open = format!("$(find {} -user 65534)", machine.runtime().display());
                machine.sh(&format!("test -z \"{open}\""));
                first.is_served_by(&record);
            }
        });
    }
}

/// There the second could put a directory of his own in the place of `uni-cumps`, whomever that belongs to.
fn without_sticky_bit(driver: &Driver) {
    if without_root() {
        return;
    }
    rounds(driver, |machine, first, _| {
        set_mode(machine.path("t"), 0o777);
        first
            .call(&["start", "--name", "a"])
            .fails("<S>/t")
            .said("0777");
        machine.has_no_daemon();
        assert!(!first.records().join("a").exists());
    });
}

fn squatting(driver: &Driver) {
    if without_root() {
        return;
    }
    rounds(driver, |machine, first, second| {
        let own = format!("$RT-{}", first.uid);
        second.does(&format!("mkdir $RT {own}; mkdir $RT/a {own}/a"));
        let parent = machine
            .runtime()
            .with_file_name(format!("uni-cumps-{}", first.uid));
        first
            .call(&["start", "--name", "a"])
            .fails(&format!(
                "{:?} cannot be used",
                machine.normal(&parent.to_string_lossy())
            ))
            .said("uid 65534")
            .said("--pipe-dir");
        // He cannot be everywhere.
        let elsewhere = first.home.join("tmp");
        first.does("mkdir tmp");
        let call = |args: &[&str]| first.call(args).env("TMPDIR", &elsewhere);
        let record = call(&["start", "--name", "a"]).succeeds().json();
        assert!(place(&record, "pipe_directory").starts_with(&elsewhere));
        // It is found from everywhere, and he has his own in the meantime.
        first.is_served_by(&record);
        let his = second.starts();
        second.is_served_by(&his);
        first.call(&["stop"]).succeeds();
        second.is_served_by(&his);
        second.call(&["stop"]).succeeds();
        machine.has_no_daemon();
    });
}

/// Locks on files and directories, held by a process.
struct Locks(Child);

impl Locks {
    fn let_go(mut self) {
        assert!(self.0.try_wait().unwrap().is_none(), "he held on");
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Takes a lock on everything that this user can open.
fn hold_locks(user: &User<'_>) -> Locks {
    let line = "while IFS= read -r -d '' path; do
                    exec {fd}<\"$path\"; flock -n $fd; count=$((count + 1))
                done < <(find \"$S\" \\( -type f -o -type d \\) -readable -print0 2>/dev/null)
                echo $count; exec sleep 600";
    let mut command = user.shell(line);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut count = String::new();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut count).unwrap();
    assert!(count.trim().parse::<u32>().unwrap() > 5, "{count}");
    Locks(child)
}

fn holding_locks(driver: &Driver) {
    if without_root() {
        return;
    }
    rounds(driver, |machine, first, second| {
        // A home as many have it: everybody may look around, and much of it was there before.
        first.does("mkdir -p .cache/unilab/cuda-mps; chmod -R 755 .");
        let before = hold_locks(second);
        let daemon = first.starts();
        before.let_go();
        let while_it_runs = hold_locks(second);
        for locked in [
            place(&daemon, "pipe_directory"),
            &first.records().join(".lock"),
            &first.records().join("a"),
        ] {
            let line = format!("flock -n {} true", locked.display());
            assert!(!second.can(&line), "{line}");
        }
        first.is_served_by(&daemon);
        let again = first.call(&["start", "--name", "a"]);
        again.fails("daemon a is already live");
        first.call(&["stop"]).succeeds().said_nothing();
        machine.has_no_daemon();
        while_it_runs.let_go();
    });
}

// Each his own.

fn side_by_side(driver: &Driver) {
    if without_root() {
        return;
    }
    rounds(driver, |machine, first, second| {
        for [one, other] in [[first, second], [second, first]] {
            let ones = one.starts();
            let others = other.starts();
            assert_ne!(ones["pipe_directory"], others["pipe_directory"]);
            for (user, daemon) in [(one, &ones), (other, &others)] {
                are_private(machine, daemon, user.uid);
                assert_eq!(daemon["uid"], user.uid);
                let process = fs::metadata(format!("/proc/{}", pid(daemon))).unwrap();
                assert_eq!(process.uid(), user.uid);
                user.is_served_by(daemon);
                let status = user.call(&["status", "--json"]).succeeds().json();
                let daemons = status["managed_daemons"].as_array().unwrap();
                assert_eq!(daemons.len(), 1);
                assert_eq!(daemons[0]["pid"], daemon["pid"]);
                user.call(&["prune"]).prints("nothing to remove\n");
            }
            let stopped = other.call(&["stop", "--all"]).succeeds().json();
            assert_eq!(stopped, json!({"stopped": [others]}));
            one.is_served_by(&ones);
            let others = other.starts();
            one.call(&["stop"]).succeeds();
            other.is_served_by(&others);
            other.call(&["stop"]).succeeds();
            machine.has_no_daemon();
            for user in [one, other] {
                user.call(&["prune"]).succeeds();
                assert!(!user.records().join("a").exists());
            }
            assert_eq!(machine.sh("find t -mindepth 2"), "");
            machine.sh("rm -r $RT*");
        }
    });
}

/// The first has opened his pipe directory. That he is told, and even so the second cannot end the daemon.
fn open_pipe_directory(driver: &Driver) {
    if without_root() {
        return;
    }
    rounds(driver, |machine, first, second| {
        first.does("mkdir -m 755 p");
        let pipe = first.home.join("p");
        let log = first.home.join("l");
        let start = first.call(&["start", "--name", "a", "--pipe-dir"]);
        let daemon = start
            .and(&pipe)
            .and("--log-dir")
            .and(log)
            .succeeds()
            .said("note: others can reach the daemon")
            .json();
        for quit in ["quit", "quit -t 0"] {
            let line = format!(
                "echo {quit} | CUDA_MPS_PIPE_DIRECTORY={} $CONTROL | grep -q privilege",
                pipe.display()
            );
            assert!(second.can(&line), "{line}");
        }
        first.is_served_by(&daemon);
        // Only root's daemon can serve others. From any other they get error 805.
        if first.uid != 0 {
            let report = second.call(&["doctor"]);
            let report = report.env("CUDA_MPS_PIPE_DIRECTORY", &pipe).finish();
            assert!(
                report.text().contains(&format!("uid {}", first.uid)),
                "{report:?}"
            );
            report.exited(1);
        }
        first.call(&["stop"]).succeeds();
        machine.has_no_daemon();
    });
}

/// NVIDIA's daemon goes on without a log, and says so in a line that a caller does not see.
fn without_log(driver: &Driver) {
    if without_root() {
        return;
    }
    let machine = driver.machine();
    let user = User::new(&machine, 1000);
    user.does("mkdir -m 500 l");
    let start = user.call(&["start", "--name", "a", "--pipe-dir"]);
    let start = start.and(user.home.join("p")).and("--log-dir");
    let done = start.and(user.home.join("l")).finish();
    assert!(done.stderr.contains("log"), "{done:?}");
}

// Root in somebody's home.

fn after_sudo(driver: &Driver) {
    if without_root() {
        return;
    }
    let machine = driver.machine();
    let user = User::new(&machine, 1000);
    // Root replaces a stale record, so that there is a quarantine as well.
    let killed = user.sudo(&["start", "--name", "n"]).succeeds().json();
    machine.kill(pid(&killed));
    let roots = user.sudo(&["start", "--name", "n"]).succeeds().json();
    let meta = fs::metadata(user.records().join("n")).unwrap();
    assert_eq!((meta.uid(), meta.mode() & 0o7777), (0, 0o700));

    let names_root = |done: Done<'_>| {
        let text = done.text();
        let line = "\nrecord name=n state=damaged reason=";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("belongs to uid 0"), "{text}");
    };
    names_root(user.call(&["status"]).succeeds());
    for _ in 0..2 {
        let mine = user
            .call(&["start", "--name", "m", "--force"])
            .succeeds()
            .json();
        names_root(user.call(&["status"]).succeeds());
        user.is_served_by(&mine);
        user.call(&["prune"]).succeeds();
        user.is_served_by(&mine);
        user.call(&["stop"]).succeeds();
    }
    // Nor does what root has left keep him from replacing a stale record of his own.
    let killed = user.call(&["start", "--name", "m"]).succeeds().json();
    machine.kill(pid(&killed));
    let mine = user.call(&["start", "--name", "m"]).succeeds().json();
    user.is_served_by(&mine);
    user.call(&["stop"]).succeeds();
    assert_eq!(machine.daemons(), [pid(&roots)]);
    user.sudo(&["stop", "--name", "n"]).succeeds();
    let mine = user.call(&["start", "--name", "n"]).succeeds().json();
    user.is_served_by(&mine);
    user.call(&["stop"]).succeeds();
    machine.has_no_daemon();
}

fn sudo_and_links(driver: &Driver) {
    if without_root() {
        return;
    }
    let records = "$HOME/.cache/unilab/cuda-mps";
    for plant in [
        "ln -s $S/victim $HOME/.cache",
        "mkdir $HOME/.cache; ln -s $S/victim $HOME/.cache/unilab",
        "mkdir -p $HOME/.cache/unilab; ln -s $S/victim $REC",
        "mkdir -p $REC; ln -s $S/victim/data $REC/.lock",
        "mkdir -p $REC; ln -s $S/victim/new $REC/.lock",
        "mkdir -p $REC; ln -s $S/victim/a $REC/a",
        "mkdir -p $REC/a; ln -s $S/victim/data $REC/a/daemon.json",
        "mkdir -p $REC/a; ln -s $S/victim/data $REC/a/starting.json",
        "mkdir -p $REC/a; echo { >$REC/a/daemon.json; ln -s $S/victim $REC/.stale",
        "mkdir -p $REC; ln -s $S/victim $REC/.stale",
        "mkdir -p $REC/.stale; ln -s $S/victim/a $REC/.stale/a-1",
    ] {
        let machine = driver.machine();
        let user = User::new(&machine, SECOND);
        make_victim(&machine, 0);
        machine.sh("echo x >victim/a/daemon.json; chmod 644 victim/a/daemon.json");
        let line = plant.replace("$REC", records);
        user.does(&line.replace("$HOME", &user.home.to_string_lossy()));
        let listing = "find victim -printf '%p %y %m %U:%G %s %T@ %C@ %l\\n' | sort";
        let before = machine.sh(listing);
        for command in [
            &["start", "--name", "a"][..],
            &["prune"],
            &["stop", "--all"],
        ] {
            let done = user.sudo(command).finish();
            assert_eq!(machine.sh(listing), before, "{plant}: {done:?}");
        }
        machine.has_no_daemon();
    }
}

/// A record that tells of a daemon of the second's, which listens where everybody can reach it, as if it were the
/// first's, started in a container.
fn lie_about(second: &User<'_>, uid: u32) -> (Value, Sleeper) {
    second.does(
        "mkdir -m 755 p l; CUDA_MPS_PIPE_DIRECTORY=$PWD/p CUDA_MPS_LOG_DIRECTORY=$PWD/l $CONTROL -d",
    );
    let process = Sleeper::new();
    let mut lie = second.machine.reference_record("evil", process.pid());
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    lie["uid"] = uid.into();
    lie["boot_id"] = boot.trim().into();
    lie["pid_namespace"] = 1.into();
    lie["pipe_directory"] = json!(second.home.join("p"));
    lie["log_directory"] = json!(second.home.join("l"));
    (lie, process)
}

/// Where the first keeps his records the second may write, as after `umask 000`.
fn open_records(driver: &Driver) {
    if without_root() {
        return;
    }
    rounds(driver, |_, first, second| {
        let real = first.starts();
        let (lie, _process) = lie_about(second, first.uid);
        write_record(&first.records(), "evil", &lie, second.uid);
        for directory in first.records().ancestors().take(3) {
            chown(directory, Some(first.uid), Some(first.uid)).unwrap();
            set_mode(directory, 0o777);
        }
        let env = first.call(&["env", "--name", "evil"]);
        env.finish().exited(1).printed("false\n");
        first.is_served_by(&real);
    });
}

/// Root looks at the records in the second's home.
fn records_of_a_user(driver: &Driver) {
    if without_root() {
        return;
    }
    let machine = driver.machine();
    let root = User::new(&machine, 0);
    let second = User::new(&machine, SECOND);
    let real = root.starts();
    let (lie, _process) = lie_about(&second, 0);
    write_record(&second.records(), "a", &real, SECOND);
    write_record(&second.records(), "evil", &lie, SECOND);
    second.sudo(&["stop", "--all"]).finish();
    assert!(is_running(pid(&real)), "it is for root's own home to say");
    root.is_served_by(&real);
    let env = second.sudo(&["env", "--name", "evil"]);
    env.finish().exited(1).printed("false\n");
}
