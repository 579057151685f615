//! What goes wrong: the fault of a user costs his tasks, that of a node its service, and what is left is found.

use std::fs;

use nix::sys::signal::Signal;

use crate::Test;
use crate::onebox::OneBox;
use crate::support::{Sleeper, is_running, signal, wait_until};

pub(crate) const TESTS: &[Test] = &[
    (
        "a_comment_that_is_not_understood_costs_the_task_and_not_the_node",
        garbage,
    ),
    ("a_job_without_a_gpu_fails_closed", without_a_gpu),
    (
        "a_daemon_that_does_not_start_costs_the_task_and_not_the_node",
        no_daemon,
    ),
    ("a_slow_daemon_is_waited_for", a_slow_daemon),
    ("a_gpu_that_fails_drains_the_node", a_gpu_that_fails),
    (
        "a_prolog_that_hangs_is_ended_and_its_epilog_cleans_up",
        a_hung_prolog,
    ),
    ("a_job_that_is_cancelled_leaves_nothing", cancelled),
    ("slurmd_is_killed_and_comes_back", slurmd_killed),
    (
        "a_daemon_that_dies_costs_the_tasks_that_come_after",
        a_dead_daemon,
    ),
    ("a_client_that_is_stuck_is_cut_off", a_stuck_client),
    (
        "a_client_of_a_job_that_is_over_is_ended_while_another_job_goes_on",
        one_of_two,
    ),
    ("what_an_epilog_has_not_done_the_health_check_does", health),
    (
        "a_job_that_comes_during_a_health_check_is_left_alone",
        health_and_a_new_job,
    ),
    (
        "where_slurm_does_not_tell_nothing_is_touched",
        health_without_squeue,
    ),
    ("what_is_left_drains_the_node", something_left),
    ("another_users_record_is_not_believed", forged),
    ("by_hand_a_hook_says_what_it_is", by_hand),
];

const SHARE: [&str; 2] = ["--gres=gpu:1", "--comment=cumps:share"];

fn garbage(onebox: &OneBox) {
    for (comment, reason) in [
        ("cumps:", "cumps: must begin with share"),
        (
            "cumps:share,threads=400",
            "it must be a number from 1 to 100",
        ),
        ("cumps:share,gpu-per=1", "is not understood"),
    ] {
        let comment = format!("--comment={comment}");
        let done = onebox
            .srun(&["--gres=gpu:1", &comment], "echo ran")
            .finish();
        assert_eq!(done.code, 1, "{done:?}");
        let text = done.text();
        assert!(
            text.contains("uni-cumps: this job asked for a shared GPU and has none"),
            "{done:?}"
        );
        assert!(text.contains(reason) && !text.contains("ran"), "{done:?}");
        onebox.left_nothing();
    }
}

fn without_a_gpu(onebox: &OneBox) {
    let done = onebox.srun(&["--comment=cumps:share"], "echo ran").finish();
    assert_eq!(done.code, 1, "{done:?}");
    assert!(
        done.text().contains("it has no GPU on this node"),
        "{done:?}"
    );
    onebox.left_nothing();
}

fn no_daemon(onebox: &OneBox) {
    onebox.machine.conduct("launch fail the driver is too old");
    let done = onebox.srun(&SHARE, "echo ran").finish();
    assert_eq!(done.code, 1, "{done:?}");
    assert!(done.text().contains("the driver is too old"), "{done:?}");
    onebox.left_nothing();
}

fn a_slow_daemon(onebox: &OneBox) {
    let program = onebox.machine.bin().join("nvidia-cuda-mps-control");
    let aside = onebox.machine.bin().join("slow/nvidia-cuda-mps-control");
    fs::create_dir_all(aside.parent().unwrap()).unwrap();
    let target = fs::read_link(&program).unwrap();
    onebox.machine.script(
        "nvidia-cuda-mps-control",
        &format!(
            "[ \"$1\" = -d ] && sleep 2\nexec -a \"$0\" {} \"$@\"",
            target.display()
        ),
    );
    onebox.machine.sh(&format!(
        "sed -i 's|^#!/bin/sh|#!/bin/bash|' {}",
        program.display()
    ));
    let job = onebox.running("a", &SHARE);
    assert!(job.variable("CUDA_MPS_PIPE_DIRECTORY").is_some());
    assert_eq!(job.end(), 0);
    onebox.is_over();
    fs::remove_file(&program).unwrap();
    std::os::unix::fs::symlink(target, program).unwrap();
    onebox.left_nothing();
}

fn a_gpu_that_fails(onebox: &OneBox) {
    onebox.machine.gpu_rows("0, [Unknown Error], Default\n");
    let done = onebox.srun(&SHARE, "echo ran").finish();
    assert_eq!(done.code, 1, "{done:?}");
    assert!(!done.text().contains("ran"), "{done:?}");
    wait_until("the node is drained", || {
        onebox.node("n1").starts_with("drain")
    });
    assert!(onebox.log("n1").contains("GPU 0 of the job is not usable"));
    onebox.is_over();
    assert_eq!(onebox.kept(), Vec::<String>::new());
    onebox.machine.has_no_daemon();
}

fn a_hung_prolog(onebox: &OneBox) {
    // PrologEpilogTimeout sends a signal to its process group; an administrator may be harder.
    for number in [Signal::SIGTERM, Signal::SIGKILL] {
        onebox.machine.conduct("answers never");
        onebox.machine.calls();
        let child = onebox.srun(&SHARE, "echo ran").spawn();
        let mut calls = String::new();
        wait_until("the daemon is asked", || {
            calls += &onebox.machine.calls();
            calls.contains("get_server_list")
        });
        let prolog = onebox.machine.processes().into_iter().find(|pid| {
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.contains("slurm\0prolog")
        });
        let group = nix::unistd::Pid::from_raw(prolog.unwrap());
        nix::sys::signal::killpg(group, number).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_ne!(output.status.code(), Some(0), "{output:?}");
        assert!(!String::from_utf8_lossy(&output.stdout).contains("ran"));
        wait_until("the node is drained", || {
            onebox.node("n1").starts_with("drain")
        });
        onebox.is_over();
        assert_eq!(onebox.kept(), Vec::<String>::new());
        onebox.machine.has_no_daemon();
        onebox.resume("n1");
    }
}

fn cancelled(onebox: &OneBox) {
    let job = onebox.running("a", &SHARE);
    assert_eq!(onebox.machine.daemons().len(), 1);
    let number = job.job().to_owned();
    onebox.slurm(&["scancel", &number]).succeeds();
    assert_ne!(job.wait(), 0);
    onebox.left_nothing();
}

fn slurmd_killed(onebox: &OneBox) {
    let job = onebox.running("a", &SHARE);
    let slurmd = onebox.slurmd(1);
    signal(slurmd, Signal::SIGKILL);
    wait_until("slurmd is gone", || !is_running(slurmd));
    assert_eq!(onebox.machine.daemons().len(), 1);
    onebox.start_slurmd(1);
    job.end();
    onebox.is_over();
    wait_until("the node is idle", || onebox.node("n1") == "idle");
    onebox.left_nothing();
}

fn a_dead_daemon(onebox: &OneBox) {
    let places = onebox.places();
    let go = places.join("go");
    let _ = fs::remove_file(&go);
    let script = places.join("two-steps.sh");
    let lines = format!(
        "#!/bin/sh\ntouch {0}.begun\nuntil [ -e {0} ]; do sleep 0.05; done\nsrun -n1 echo ran || echo status=$?\n",
        go.display()
    );
    fs::write(&script, lines).unwrap();
    let out = places.join("two-steps.out");
    let _ = fs::remove_file(&out);
    let output = format!("--output={}", out.display());
    let words = ["sbatch", "-W", "-w", "n1", &output];
    let mut job = onebox
        .slurm(&words)
        .with(SHARE)
        .and(script.to_str().unwrap())
        .spawn();
    let begun = places.join("go.begun");
    wait_until("the script runs", || begun.exists());
    fs::remove_file(begun).unwrap();
    let daemons = onebox.machine.daemons();
    assert_eq!(daemons.len(), 1);
    onebox.machine.kill(daemons[0]);
    fs::write(&go, "").unwrap();
    wait_until("the job is over", || job.try_wait().unwrap().is_some());
    let text = fs::read_to_string(&out).unwrap();
    assert!(text.contains("its daemon is gone"), "{text}");
    assert!(text.contains("status=1") && !text.contains("ran"), "{text}");
    onebox.left_nothing();
}

fn a_stuck_client(onebox: &OneBox) {
    let client = Sleeper::new();
    let server = Sleeper::new();
    onebox.machine.conduct(&format!(
        "servers {}\nclients {}",
        server.pid(),
        client.pid()
    ));
    let job = onebox.running("a", &SHARE);
    assert_eq!(job.end(), 0);
    onebox.left_nothing();
    // It is cut off, and not killed.
    assert!(is_running(client.pid()));
}

fn one_of_two(onebox: &OneBox) {
    let server = Sleeper::new();
    let clients = onebox.machine.path("clients");
    fs::write(&clients, "").unwrap();
    crate::support::set_mode(&clients, 0o666);
    let conduct = format!("servers {}\nclients-in {}", server.pid(), clients.display());
    onebox.machine.conduct(&conduct);
    let options = ["--gres=mps:20", "--uid=65534"];
    let stays = onebox.running("a", &options);
    let goes = onebox.running("b", &options);
    // A process of the second job that Slurm does not know any more.
    let orphan = Sleeper::of(65534, &[("SLURM_JOB_ID", goes.job())]);
    fs::write(&clients, orphan.pid().to_string()).unwrap();
    assert_eq!(goes.end(), 0);
    wait_until("the client is let go", || {
        fs::read_to_string(&clients).unwrap().trim().is_empty()
    });
    assert!(is_running(orphan.pid()));
    // While it is asked, the front-end has the daemon's name.
    wait_until("one daemon is left", || onebox.machine.daemons().len() == 1);
    assert_eq!(stays.end(), 0);
    onebox.left_nothing();
}

fn health(onebox: &OneBox) {
    onebox.hook("epilog", "exit 0");
    let job = onebox.running("a", &SHARE);
    let going_on = onebox.running("b", &["--gres=mps:20", "--uid=65534"]);
    assert_eq!(job.end(), 0);
    wait_until("the first job is over", || {
        let jobs = onebox.slurm(&["squeue", "-h"]).finish();
        String::from_utf8_lossy(&jobs.stdout).lines().count() == 1
    });
    assert_eq!(onebox.machine.daemons().len(), 2);
    let done = onebox
        .call_hook("health", &[("SLURMD_NODENAME", "n1")])
        .exited(0);
    assert!(
        done.stderr.contains("is over, and something of it is left"),
        "{done:?}"
    );
    assert_eq!(onebox.machine.daemons().len(), 1);
    // The other node has nothing to do with it.
    onebox
        .call_hook("health", &[("SLURMD_NODENAME", "n2")])
        .exited(0)
        .said_nothing();
    onebox
        .call_hook("health", &[("SLURMD_NODENAME", "n1")])
        .exited(0)
        .said_nothing();
    assert_eq!(going_on.end(), 0);
    onebox.is_over();
    onebox
        .call_hook("health", &[("SLURMD_NODENAME", "n1")])
        .exited(0);
    onebox.left_nothing();
}

fn health_without_squeue(onebox: &OneBox) {
    let job = onebox.running("a", &SHARE);
    for squeue in [
        "exit 1",
        "echo slurm_load_jobs error",
        "echo 'no controller' >&2; exit 1",
    ] {
        onebox.machine.script("squeue", squeue);
        let done = onebox
            .call_hook("health", &[("SLURMD_NODENAME", "n1")])
            .exited(1);
        assert!(
            done.stderr
                .contains("Slurm does not tell which jobs are on node n1"),
            "{done:?}"
        );
    }
    onebox.machine.remove_program("squeue");
    assert_eq!(onebox.machine.daemons().len(), 1);
    assert_eq!(job.end(), 0);
    onebox.left_nothing();
}

fn something_left(onebox: &OneBox) {
    let job = onebox.running("a", &SHARE);
    let key = onebox
        .kept()
        .into_iter()
        .find(|path| path.ends_with("/pipe"))
        .unwrap();
    let record = onebox
        .state()
        .join(key.trim_end_matches("pipe"))
        .join(".cache/unilab/cuda-mps/slurm/daemon.json");
    // Whoever has damaged it: the daemon is no longer provably ours.
    let text = fs::read_to_string(&record).unwrap();
    fs::write(&record, "{").unwrap();
    assert_eq!(job.end(), 0);
    wait_until("the node is drained", || {
        onebox.node("n1").starts_with("drain")
    });
    assert_eq!(onebox.machine.daemons().len(), 1);
    assert!(onebox.log("n1").contains("something is left of job"));
    fs::write(&record, text).unwrap();
    onebox
        .call_hook("health", &[("SLURMD_NODENAME", "n1")])
        .exited(0);
    onebox.machine.has_no_daemon();
    onebox.resume("n1");
    onebox.left_nothing();
}

fn forged(onebox: &OneBox) {
    let directory = onebox.state().join("slurm/onebox/7/n1");
    fs::create_dir_all(&directory).unwrap();
    let file = directory.join("job.json");
    let pipe = onebox.machine.path("p");
    fs::write(&file, format!("{{\"uid\": 1, \"outcome\": {{\"shared\": {{\"places\": [{{\"gpus\": [], \"pipe\": {pipe:?}, \"log\": {pipe:?}}}]}}}}}}")).unwrap();
    std::os::unix::fs::chown(&file, Some(65534), None).unwrap();
    let variables = [
        ("SLURM_JOB_ID", "7"),
        ("SLURM_CLUSTER_NAME", "onebox"),
        ("SLURMD_NODENAME", "n1"),
    ];
    let done = onebox.call_hook("task-prolog", &variables).exited(1);
    assert!(
        done.stderr.contains("uid 65534 wrote it, and not root"),
        "{done:?}"
    );
}

fn by_hand(onebox: &OneBox) {
    for hook in ["prolog", "task-prolog", "epilog", "health"] {
        let done = onebox.call_hook(hook, &[]).exited(1);
        assert!(
            done.stderr.contains("this is a hook, which Slurm calls"),
            "{done:?}"
        );
    }
    for (key, value) in [
        ("SLURM_JOB_ID", "7/../8"),
        ("SLURM_CLUSTER_NAME", "../etc"),
        ("SLURMD_NODENAME", ".n1"),
        ("SLURM_JOB_UID", "root"),
        ("SLURM_JOB_GPUS", "0;1"),
    ] {
        let mut variables = vec![
            ("SLURM_JOB_ID", "7"),
            ("SLURM_CLUSTER_NAME", "onebox"),
            ("SLURMD_NODENAME", "n1"),
            ("SLURM_JOB_UID", "65534"),
            ("SLURM_JOB_GPUS", "0"),
            ("SLURM_JOB_COMMENT", "cumps:share"),
        ];
        variables.retain(|(name, _)| *name != key);
        variables.push((key, value));
        let done = onebox.call_hook("prolog", &variables).exited(1);
        assert!(done.stderr.contains("is not what Slurm sets"), "{done:?}");
    }
    assert_eq!(onebox.kept(), Vec::<String>::new());
}

fn health_and_a_new_job(onebox: &OneBox) {
    let old = onebox.running("a", &["--gres=mps:20", "--uid=65534"]);
    let begun = onebox.machine.path("squeue-began");
    let end = onebox.machine.path("squeue-may-end");
    let job = old.job();
    onebox.machine.script(
        "squeue",
        &format!(
            "touch {}\nuntil [ -e {} ]; do sleep 0.05; done\necho {job}",
            begun.display(),
            end.display()
        ),
    );
    let health = onebox
        .hook_call("health", &[("SLURMD_NODENAME", "n1")])
        .spawn();
    wait_until("squeue is asked", || begun.exists());
    let new = onebox.running("b", &SHARE);
    fs::write(&end, "").unwrap();
    let output = health.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(onebox.machine.daemons().len(), 2);
    onebox.machine.remove_program("squeue");
    assert_eq!(new.end(), 0);
    assert_eq!(old.end(), 0);
    onebox.left_nothing();
}
