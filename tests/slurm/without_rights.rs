//! Without an administrator: `srun uni-cumps run --per-node`.

use std::fs;

use crate::Test;
use crate::onebox::{NOBODY, OneBox};
use crate::support::{set_mode, uni_cumps};

pub(crate) const TESTS: &[Test] = &[
    ("eight_ranks_race_for_a_daemon_and_leave_none", eight_ranks),
    ("the_ranks_of_two_nodes_leave_none", two_nodes),
    (
        "a_job_that_is_cancelled_keeps_no_rank_from_a_daemon",
        cancelled,
    ),
];

/// `srun` with these options, as a user without rights, of a program under `uni-cumps run --per-node`.
fn ranks<'b>(onebox: &'b OneBox, options: &[&str], line: &str) -> crate::support::Call<'b> {
    for hook in ["prolog", "epilog", "task-prolog"] {
        onebox.hook(hook, "exit 0");
    }
    let home = onebox.machine.path("home");
    let _ = fs::create_dir(&home);
    std::os::unix::fs::chown(&home, Some(NOBODY), None).unwrap();
    set_mode(&home, 0o700);
    let binary = uni_cumps().to_str().unwrap();
    let call = onebox.slurm(&["srun", "--uid=65534"]).with(options);
    let mut call = call.with([
        binary,
        "run",
        "--per-node",
        "--gpu",
        "0",
        "--",
        "/bin/sh",
        "-c",
        line,
    ]);
    for (key, value) in onebox.surroundings() {
        call = call.env(&key, value);
    }
    let tmp = onebox.machine.path("t");
    call.env("HOME", &home).env("TMPDIR", tmp)
}

fn left_nothing(onebox: &OneBox) {
    onebox.is_over();
    onebox.machine.has_no_daemon();
}

fn eight_ranks(onebox: &OneBox) {
    let options = ["-N1", "-w", "n1", "-n8", "--gres=gpu:1"];
    let line = "echo $CUDA_MPS_PIPE_DIRECTORY; sleep 0.$SLURM_PROCID";
    let text = ranks(onebox, &options, line).succeeds().text();
    let mut pipes: Vec<&str> = text.lines().collect();
    assert_eq!(pipes.len(), 8, "{text}");
    pipes.dedup();
    assert_eq!(pipes.len(), 1, "{text}");
    left_nothing(onebox);
    let starts = onebox.machine.calls().matches("control -d").count();
    assert_eq!(starts, 1);
}

fn two_nodes(onebox: &OneBox) {
    // Both are one machine here, so that all four share one daemon: what counts is that nobody is left out.
    let options = ["-N2", "-n4", "--gres=gpu:1"];
    let text = ranks(onebox, &options, "echo $CUDA_MPS_PIPE_DIRECTORY; sleep 0.5")
        .succeeds()
        .text();
    assert_eq!(text.lines().count(), 4, "{text}");
    left_nothing(onebox);
}

fn cancelled(onebox: &OneBox) {
    let begun = onebox.machine.path("t/begun");
    let line = format!("touch {}; sleep 60", begun.display());
    let options = ["-N1", "-w", "n1", "-n2", "--gres=gpu:1"];
    let mut job = ranks(onebox, &options, &line).spawn();
    crate::support::wait_until("the ranks run", || begun.exists());
    onebox.slurm(&["scancel", "-u", "nobody"]).succeeds();
    crate::support::wait_until("srun ends", || job.try_wait().unwrap().is_some());
    onebox.is_over();
    fs::remove_file(begun).unwrap();
    // SIGTERM reached the ranks first, and the last one out has ended the daemon.
    crate::support::wait_until("the daemon is gone", || onebox.machine.daemons().is_empty());
    let done = ranks(onebox, &options, "echo ran").prints("ran\nran\n");
    done.said_nothing();
    left_nothing(onebox);
}
