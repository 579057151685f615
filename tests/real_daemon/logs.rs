//! `logs` with what NVIDIA's own daemon writes.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout};

use serde_json::Value;

use crate::support::{Sandbox, pid};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    ("logs_show_the_daemons_own_lines", own_lines),
    ("logs_follow_a_daemon_to_its_end", followed_to_the_end),
    ("logs_tell_why_there_is_no_server", no_server),
];

/// A question that the daemon writes down.
fn ask(machine: &Sandbox, pipe: &str) {
    machine.sh(&format!(
        "echo {pipe} | CUDA_MPS_PIPE_DIRECTORY=$RT/a/pipe timeout 20 $CONTROL || true"
    ));
}

/// The messages of the log, once one of them says this.
fn objects(machine: &Sandbox, text: &str) -> Vec<Value> {
    let mut found = Vec::new();
    crate::support::wait_until("it is logged", || {
        let done = machine.run(["logs", "--name", "a", "--json"]).succeeds();
        let all = done.text();
        found = all
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        found
            .iter()
            .any(|message: &Value| message["text"].as_str().unwrap().contains(text))
    });
    found
}

fn own_lines(driver: &Driver) {
    let machine = driver.machine();
    let daemon = pid(&machine.start(&["--name", "a"]));
    ask(&machine, "get_default_active_thread_percentage");
    let messages = objects(&machine, "Cmd:get_default_active_thread_percentage");
    let said = |text: &str| {
        let of_daemon = |message: &&Value| message["pid"] == daemon;
        let mut all = messages.iter().filter(of_daemon);
        all.position(|message| message["text"].as_str().unwrap().starts_with(text))
    };
    let (starts, asked) = (said("Starting control daemon"), said("Cmd:get_default"));
    assert!(starts.is_some() && starts < asked, "{messages:#?}");
    for message in &messages {
        assert_eq!(message["source"], "Control", "{message}");
        assert_eq!(message["time"].as_str().unwrap().len(), 23);
        assert_ne!(message["level"], "error", "{message}");
    }
    let file = machine.runtime().join("a/log/control.log");
    let plain = machine.run(["logs", "--name", "a"]).succeeds();
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.starts_with(&*String::from_utf8_lossy(&plain.stdout)));
    // What was said just now was said within the last minutes, whatever the zone.
    for zone in ["UTC0", "<+1130>-11:30"] {
        let recent = machine
            .run(["logs", "--name", "a", "--since", "10m"])
            .env("TZ", zone)
            .succeeds();
        assert!(recent.text().contains("Starting control daemon"));
    }
    machine.run(["stop", "--name", "a"]).succeeds();
    let text = fs::read_to_string(&file).unwrap();
    let after = machine.run(["logs", "--name", "a"]).succeeds();
    assert_eq!(String::from_utf8_lossy(&after.stdout), text);
    assert!(text.contains("Exit with status 0"), "{text}");
    machine
        .run(["logs"])
        .fails("no recorded daemon is live")
        .said("hint: uni-cumps logs --name a");
}

/// `logs -f`, which is ended with the test.
struct Following(Child, BufReader<ChildStdout>);

impl Following {
    fn of(machine: &Sandbox) -> Self {
        let call = machine.run(["logs", "--name", "a", "-f", "--control", "-q"]);
        let mut child = call.spawn();
        let out = child.stdout.take().unwrap();
        Self(child, BufReader::new(out))
    }

    /// Reads until somebody says this.
    fn comes_to(&mut self, text: &str) {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            assert_ne!(self.1.read_line(&mut line).unwrap(), 0, "{text}");
        }
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn followed_to_the_end(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    let mut following = Following::of(&machine);
    following.comes_to("Starting control daemon");
    ask(&machine, "get_server_list_1");
    following.comes_to("Cmd:get_server_list_1");
    machine.sh(": > $RT/a/log/control.log");
    ask(&machine, "get_server_list_2");
    following.comes_to("Cmd:get_server_list_2");
    // The daemon goes on with the file that it has opened, whatever its name is.
    machine.sh("mv $RT/a/log/control.log $RT/a/log/control.log.1; : > $RT/a/log/control.log");
    ask(&machine, "get_server_list_3");
    following.comes_to("Cmd:get_server_list_3");
    machine.sh("rm $RT/a/log/control.log.1");
    ask(&machine, "get_server_list_4");
    following.comes_to("Cmd:get_server_list_4");
    machine.run(["stop", "--name", "a"]).succeeds();
    let mut rest = String::new();
    following.1.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("Exit with status 0\n"), "{rest}");
    assert_eq!(following.0.wait().unwrap().code(), Some(0));
}

/// Without a GPU and without libcuda no server becomes ready, and the log says so.
fn no_server(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    let uid = crate::support::our_uid();
    ask(&machine, &format!("start_server -uid {uid}"));
    let messages = objects(&machine, "exited with status");
    let failed = messages.iter().find(|message| {
        message["text"]
            .as_str()
            .unwrap()
            .contains("exited with status")
    });
    assert_eq!(failed.unwrap()["level"], "error");
    let errors = machine
        .run(["logs", "--name", "a", "--level", "error"])
        .succeeds()
        .text();
    assert!(errors.contains("exited with status"), "{errors}");
    assert!(!errors.contains("Starting new server"), "{errors}");
}
