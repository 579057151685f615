//! The cluster: two nodes `n1` and `n2` with two GPUs each, and hooks that call the binary.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};

use crate::packages;
use crate::support::{Call, Done, Sandbox, set_mode, uni_cumps, uuid, wait_until};

/// Users that are on every machine.
pub(crate) const NOBODY: u32 = 65534;
pub(crate) const DAEMON: u32 = 1;

pub(crate) struct OneBox {
    pub(crate) machine: Sandbox,
    variables: BTreeMap<String, String>,
}

impl OneBox {
    pub(crate) fn up() -> Self {
        let machine = Sandbox::with_gpus(2);
        let mut onebox = Self {
            machine,
            variables: BTreeMap::new(),
        };
        fs::create_dir_all(onebox.path("hooks")).unwrap();
        onebox.variables = onebox
            .script(&["env"])
            .lines()
            .filter_map(|line| line.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        onebox.hooks_are_ours();
        onebox.script(&["up", "2"]);
        onebox
    }

    fn path(&self, below: &str) -> PathBuf {
        self.machine.path("box").join(below)
    }

    /// Where the hooks keep what they know.
    pub(crate) fn state(&self) -> PathBuf {
        self.machine.path("run")
    }

    fn script(&self, words: &[&str]) -> String {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/slurm/onebox");
        let log = self.machine.path("onebox.log");
        let out = self.machine.path("onebox.out");
        let status = Command::new(script)
            .args(words)
            .env("ONEBOX", self.machine.path("box"))
            .env("ONEBOX_PACKAGES", packages())
            .env(
                "ONEBOX_PORT",
                (20_000 + std::process::id() % 20_000).to_string(),
            )
            // Daemons that live on keep a pipe open.
            .stdout(fs::File::create(&out).unwrap())
            .stderr(fs::File::create(&log).unwrap())
            .status()
            .unwrap();
        assert!(
            status.success(),
            "{words:?}: {}",
            fs::read_to_string(log).unwrap()
        );
        fs::read_to_string(out).unwrap()
    }

    /// Installs a hook: written aside and renamed, since slurmd may be executing it.
    pub(crate) fn hook(&self, name: &str, body: &str) {
        let (aside, file) = (
            self.path(&format!("hooks/.{name}")),
            self.path(&format!("hooks/{name}")),
        );
        fs::write(&aside, format!("#!/bin/sh\n{body}\n")).unwrap();
        set_mode(&aside, 0o755);
        fs::rename(aside, file).unwrap();
    }

    /// The line of a hook that calls the binary, in the environment of this machine's stand-ins.
    pub(crate) fn ours(&self, hook: &str) -> String {
        let mut line = String::new();
        for (key, value) in self.surroundings() {
            line += &format!("export {key}='{value}'\n");
        }
        let state = self.state();
        line + &format!(
            "exec {} slurm {hook} --state-dir {}",
            uni_cumps().display(),
            state.display()
        )
    }

    /// PATH with the stand-ins, and what these and Slurm's programs need.
    pub(crate) fn surroundings(&self) -> BTreeMap<String, String> {
        let mut all = self.variables.clone();
        let bin = self.machine.bin();
        if let Some(path) = all.get_mut("PATH") {
            *path = format!("{}:{path}", bin.display());
        }
        all.insert(
            "STUB_GPUS".into(),
            bin.join("gpus.csv").display().to_string(),
        );
        all
    }

    fn hooks_are_ours(&self) {
        for hook in ["prolog", "task-prolog", "epilog", "health"] {
            self.hook(hook, &self.ours(hook));
        }
    }

    /// Everything is as at the beginning: hooks, GPUs, nodes; no job, no daemon.
    pub(crate) fn begin(&self) {
        self.machine.conduct("");
        let row = |index| format!("{index}, {}, Default\n", uuid(index));
        self.machine.gpu_rows((0..2).map(row).collect::<String>());
        self.hooks_are_ours();
        self.cancel_all();
        self.is_over();
        for daemon in self.machine.daemons() {
            self.machine.kill(daemon);
        }
        let _ = fs::remove_dir_all(self.state());
        for node in ["n1", "n2"] {
            self.resume(node);
        }
        // Stand-ins of other users write down their calls as well.
        let _ = fs::write(self.machine.bin().join("calls"), "");
        set_mode(self.machine.bin().join("calls"), 0o666);
    }

    /// One of Slurm's programs; none may take longer than a minute.
    pub(crate) fn slurm(&self, words: &[&str]) -> Call<'_> {
        let limited = ["/usr/bin/timeout", "-s", "KILL", "60"];
        let mut call = self.machine.run([""; 0]).instead(limited).with(words);
        for (key, value) in &self.variables {
            call = call.env(key, value);
        }
        call
    }

    /// A job of one task on `n1`, whose shell line this is.
    pub(crate) fn srun(&self, options: &[&str], line: &str) -> Call<'_> {
        self.slurm(&["srun", "-N1", "-w", "n1"])
            .with(options)
            .with(["/bin/sh", "-c", line])
    }

    /// Such a job in the background, once its task has begun. The task waits for a file.
    pub(crate) fn running(&self, name: &str, options: &[&str]) -> Running {
        let places = self.places();
        let (begun, end) = (
            places.join(format!("{name}.begun")),
            places.join(format!("{name}.end")),
        );
        let _ = (fs::remove_file(&begun), fs::remove_file(&end));
        let line = format!(
            "env >{0}.new; mv {0}.new {0}; until [ -e {1} ]; do sleep 0.05; done",
            begun.display(),
            end.display()
        );
        let child = self.srun(options, &line).spawn();
        wait_until("the task runs", || begun.exists());
        let environment = fs::read_to_string(&begun).unwrap();
        Running {
            child,
            end,
            environment,
        }
    }

    /// A directory in which the tasks of all users leave files.
    pub(crate) fn places(&self) -> PathBuf {
        let places = self.machine.path("places");
        let _ = fs::create_dir(&places);
        set_mode(&places, 0o1777);
        places
    }

    fn cancel_all(&self) {
        for user in ["root", "nobody", "daemon"] {
            self.slurm(&["scancel", "-u", user]).finish();
        }
    }

    /// No job is left, and so every epilog has ended.
    pub(crate) fn is_over(&self) {
        wait_until("no job is left", || {
            let done = self.slurm(&["squeue", "-h"]).finish();
            done.code == 0 && done.stdout.is_empty()
        });
    }

    /// Nothing is kept, and no daemon runs.
    #[track_caller]
    pub(crate) fn left_nothing(&self) {
        self.is_over();
        assert_eq!(self.kept(), Vec::<String>::new());
        self.machine.has_no_daemon();
        assert!(!self.gpus().contains("Exclusive"), "{}", self.gpus());
        assert_eq!(self.node("n1"), "idle");
    }

    pub(crate) fn gpus(&self) -> String {
        fs::read_to_string(self.machine.bin().join("gpus.csv")).unwrap()
    }

    /// The files that are kept, without the lock.
    pub(crate) fn kept(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut open = vec![self.state()];
        while let Some(directory) = open.pop() {
            for entry in fs::read_dir(directory).into_iter().flatten() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    open.push(path.clone());
                }
                if !path.ends_with(".lock") && (path.is_file() || path.ends_with("pipe")) {
                    found.push(
                        path.strip_prefix(self.state())
                            .unwrap()
                            .display()
                            .to_string(),
                    );
                }
            }
        }
        found.sort();
        found
    }

    /// The state of a node, as `idle` or `drained`.
    pub(crate) fn node(&self, name: &str) -> String {
        let done = self
            .slurm(&["sinfo", "-h", "-n", name, "-o", "%T"])
            .finish();
        String::from_utf8(done.stdout)
            .unwrap()
            .trim()
            .trim_end_matches('*')
            .to_owned()
    }

    pub(crate) fn resume(&self, node: &str) {
        if self.node(node) != "idle" {
            let name = format!("nodename={node}");
            self.slurm(&["scontrol", "update", &name, "state=resume"])
                .finish();
            wait_until("the node is idle", || self.node(node) == "idle");
        }
    }

    /// What slurmd of a node has logged.
    pub(crate) fn log(&self, node: &str) -> String {
        fs::read_to_string(self.path(&format!("log/slurmd-{node}.log"))).unwrap()
    }

    pub(crate) fn slurmd(&self, node: u32) -> i32 {
        let file = self.path(&format!("run/n{node}.pid"));
        fs::read_to_string(file).unwrap().trim().parse().unwrap()
    }

    /// Starts slurmd of a node once more.
    pub(crate) fn start_slurmd(&self, node: u32) {
        self.script(&["slurmd", &node.to_string()]);
    }

    /// The hook as slurmd would call it, by hand.
    pub(crate) fn hook_call(&self, name: &str, variables: &[(&str, &str)]) -> Call<'_> {
        let hook = self.path(&format!("hooks/{name}"));
        let mut call = self.machine.run([""; 0]).instead([hook]);
        for (key, value) in variables {
            call = call.env(key, value);
        }
        call
    }

    pub(crate) fn call_hook(&self, name: &str, variables: &[(&str, &str)]) -> Done<'_> {
        self.hook_call(name, variables).finish()
    }
}

impl Drop for OneBox {
    fn drop(&mut self) {
        self.cancel_all();
        self.script(&["down"]);
    }
}

/// A job whose task runs.
pub(crate) struct Running {
    pub(crate) child: Child,
    end: PathBuf,
    environment: String,
}

impl Running {
    pub(crate) fn variable(&self, key: &str) -> Option<&str> {
        let mut lines = self.environment.lines();
        lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    }

    pub(crate) fn job(&self) -> &str {
        self.variable("SLURM_JOB_ID").unwrap()
    }

    /// Lets the task end; returns srun's status.
    pub(crate) fn end(self) -> i32 {
        fs::write(&self.end, "").unwrap();
        self.wait()
    }

    pub(crate) fn wait(mut self) -> i32 {
        wait_until("srun ends", || self.child.try_wait().unwrap().is_some());
        self.child.wait().unwrap().code().unwrap_or(-1)
    }
}
