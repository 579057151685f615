//! Processes leave their GPUs and come back, in one go and step by step.

use std::fs;

use serde_json::json;

use crate::support::{Sandbox, Sleeper, U0};

use super::{CHECKPOINTED, LOCKED, RUNNING, acts, checkpoint, conditions, entries, target, uses};

#[test]
fn a_process_leaves_its_gpu_and_comes_back() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    uses(&machine, &[(&target, U0, "812")]);
    checkpoint(&machine, &["suspend"], &[&target])
        .prints(&format!(
            "pid={pid} program=sleep before=running after=checkpointed gpus=GPU-U0 memory_mib=812\n"
        ))
        .said_nothing();
    assert_eq!(machine.cuda_state(pid), CHECKPOINTED);
    let acts_then = acts(&machine);
    let (lock, rest) = acts_then.split_once('\n').unwrap();
    assert!(lock.starts_with(&format!("lock {pid} timeout=")), "{lock}");
    assert_eq!(rest, format!("checkpoint {pid}\n"));

    checkpoint(&machine, &["resume"], &[&target])
        .prints(&format!(
            "pid={pid} program=sleep before=checkpointed after=running gpus=GPU-U0 memory_mib=812\n"
        ))
        .said_nothing();
    assert_eq!(machine.cuda_state(pid), RUNNING);
    assert_eq!(acts(&machine), format!("restore {pid}\nunlock {pid}\n"));
    assert_eq!(entries(&machine), 0);
}

#[test]
fn all_are_locked_before_any_is_checkpointed_and_restored_before_any_is_unlocked() {
    let machine = Sandbox::new();
    let targets = [RUNNING; 3].map(|state| target(&machine, state));
    let [a, b, c] = [&targets[0], &targets[1], &targets[2]];
    // Whatever the order in which they are named, and however often.
    checkpoint(&machine, &["suspend", "--quiet"], &[c, a, b, a]).succeeds();
    let words = |acts: String| -> Vec<String> {
        let line = |line: &str| line.split(" timeout").next().unwrap().to_owned();
        acts.lines().map(line).collect()
    };
    let in_turn = |actions: [&str; 2]| -> Vec<String> {
        let mut pids = targets.iter().map(Sleeper::pid).collect::<Vec<_>>();
        pids.sort_unstable();
        let of = |action: &str| {
            pids.iter()
                .map(|pid| format!("{action} {pid}"))
                .collect::<Vec<_>>()
        };
        actions.map(of).concat()
    };
    assert_eq!(words(acts(&machine)), in_turn(["lock", "checkpoint"]));
    checkpoint(&machine, &["resume", "--all", "--quiet"], &[]).succeeds();
    assert_eq!(words(acts(&machine)), in_turn(["restore", "unlock"]));
}

#[test]
fn the_single_steps_lead_through_every_state() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    for (step, before, after) in [
        ("lock", "running", "locked"),
        ("checkpoint", "locked", "checkpointed"),
        ("restore", "checkpointed", "locked"),
        ("unlock", "locked", "running"),
    ] {
        checkpoint(&machine, &[step, "--quiet"], &[&target]).prints(&format!(
            "pid={pid} program=sleep before={before} after={after} gpus=unknown memory_mib=unknown\n"
        ));
        checkpoint(&machine, &["state"], &[&target])
            .prints(&format!("pid={pid} state={after}\n"))
            .said_nothing();
    }
    let thread = pid + 1;
    checkpoint(&machine, &["restore-thread"], &[&target])
        .prints(&format!("pid={pid} restore_thread_id={thread}\n"));
    let found = checkpoint(&machine, &["restore-thread", "--json"], &[&target])
        .succeeds()
        .json();
    assert_eq!(found, json!({"pid": pid, "restore_thread_id": thread}));
}

#[test]
fn a_step_that_is_done_already_does_nothing_and_succeeds() {
    let machine = Sandbox::new();
    for (words, state) in [
        ("suspend", CHECKPOINTED),
        ("resume", RUNNING),
        ("lock", LOCKED),
        ("checkpoint", CHECKPOINTED),
        ("unlock", RUNNING),
    ] {
        let target = target(&machine, state);
        checkpoint(&machine, &[words], &[&target]).succeeds();
        assert_eq!(acts(&machine), "", "{words}");
        assert_eq!(machine.cuda_state(target.pid()), state);
    }
}

#[test]
fn a_step_from_a_wrong_state_is_refused_and_touches_nothing() {
    let machine = Sandbox::new();
    for (words, state, sentence) in [
        (
            "lock",
            CHECKPOINTED,
            "is checkpointed; to lock it, it must be running",
        ),
        (
            "checkpoint",
            RUNNING,
            "is running; to checkpoint it, it must be locked",
        ),
        (
            "restore",
            RUNNING,
            "is running; to restore it, it must be checkpointed",
        ),
        (
            "restore",
            LOCKED,
            "is locked; to restore it, it must be checkpointed",
        ),
        (
            "unlock",
            CHECKPOINTED,
            "is checkpointed; to unlock it, it must be locked",
        ),
        ("suspend", LOCKED, "is locked already"),
        (
            "suspend",
            3,
            "is failed: an earlier checkpoint or restore went wrong for good",
        ),
        ("resume", 3, "is failed"),
        ("resume", 4, "is checkpointing already"),
        ("suspend", 5, "is restoring already"),
        ("suspend", 77, "is unknown-77 already"),
    ] {
        let target = target(&machine, state);
        checkpoint(&machine, &[words], &[&target]).fails(sentence);
        assert_eq!(acts(&machine), "", "{words}");
        assert_eq!(machine.cuda_state(target.pid()), state);
    }
}

#[test]
fn cuda_is_initialised_only_for_a_restore_and_never_where_a_control_daemon_could_be() {
    let machine = Sandbox::new();
    conditions(
        &machine,
        &[("NVIDIA H200", "100000", "Enabled", "Disabled")],
    );
    let target = target(&machine, RUNNING);
    let with_mask = |words: &[&str]| {
        let call = checkpoint(&machine, words, &[&target]);
        call.env("CUDA_VISIBLE_DEVICES", "0")
            .env("CUDA_MPS_PIPE_DIRECTORY", machine.path("t/elsewhere"))
            .env("CUDA_CHECKPOINT_JOB_FILE", "/ours")
            .succeeds();
    };
    // Before it is taken away, to know that it can be brought back, and to bring it back.
    for verb in ["suspend", "resume"] {
        with_mask(&[verb, "--quiet"]);
        let calls = machine.cuda_calls();
        let inits: Vec<&str> = calls.lines().filter(|it| it.starts_with("init ")).collect();
        let [init] = inits[..] else { panic!("{calls}") };
        let mps = init.split(' ').nth(1).unwrap();
        assert!(mps.starts_with("mps=<S>/t/uni-cumps-nowhere-"), "{init}");
        assert!(init.ends_with(" empty=true mask=none job=none"), "{init}");
    }
    with_mask(&["lock", "--quiet"]);
    with_mask(&["unlock", "--quiet"]);
    with_mask(&["state"]);
    assert!(!machine.cuda_calls().contains("init"));
    // Nothing of it is left.
    assert_eq!(fs::read_dir(machine.path("t")).unwrap().count(), 0);
}

#[test]
fn without_a_place_for_the_empty_directory_another_one_is_found() {
    let machine = Sandbox::new();
    for tmp in ["/proc", "/nonexistent"] {
        let target = target(&machine, CHECKPOINTED);
        let call = checkpoint(&machine, &["resume", "--quiet"], &[&target]);
        call.env("TMPDIR", tmp).succeeds();
        assert!(machine.cuda_calls().contains(" empty=true "));
    }
}

#[test]
fn the_job_of_a_process_is_named_to_the_driver() {
    let machine = Sandbox::new();
    let mut command = std::process::Command::new("/bin/sleep");
    command
        .arg("600")
        .env("CUDA_CHECKPOINT_JOB_FILE", "/proc/7/fd/9");
    let target = Sleeper(command.spawn().unwrap());
    machine.cuda_process(target.pid(), CHECKPOINTED);
    checkpoint(&machine, &["resume", "--quiet"], &[&target]).succeeds();
    assert!(machine.cuda_calls().contains("job=/proc/7/fd/9"));
}

#[test]
fn a_number_that_is_no_process_id_is_not_understood() {
    let machine = Sandbox::new();
    for words in [
        &["suspend"][..],
        &["suspend", "--pid", "0"],
        &["suspend", "--pid", "-1"],
        &["suspend", "--pid", "x"],
        &["suspend", "--pid", "99999999999"],
        &["state"],
        &["lock", "--pid", "1", "--timeout", "0"],
        &["lock", "--pid", "1", "--pid", "2"],
        &["resume", "--pid", "1", "--all"],
        &[],
    ] {
        machine.run(["checkpoint"]).with(words).breaks_usage();
    }
}

#[test]
fn the_states_of_several_processes_are_shown_and_one_that_has_none_is_said() {
    let machine = Sandbox::new();
    let locked = target(&machine, LOCKED);
    let plain = Sleeper::new();
    let [a, b] = [locked.pid(), plain.pid()];
    let hint = "nvidia-smi lists the processes that use a GPU; a launcher's child may be meant";
    let done = checkpoint(&machine, &["state"], &[&locked, &plain]);
    let expected = format!(
        "pid={a} state=locked\npid={b} state=none reason=pid {b} does not use CUDA hint={hint}\n"
    );
    assert_eq!(done.finish().exited(1).said_nothing().text(), expected);
    let told = json!({"pid": b, "state": null, "reason": format!("pid {b} does not use CUDA"), "hint": hint});
    let states = |targets: &[&Sleeper]| {
        let done = checkpoint(&machine, &["state", "--json"], targets).finish();
        done.exited(1).json()["processes"].clone()
    };
    let known = json!({"pid": a, "state": "locked", "reason": null, "hint": null});
    assert_eq!(states(&[&locked, &plain]), json!([known, told]));
    // One form, whatever there is to tell.
    assert_eq!(states(&[&plain]), json!([told]));
}

#[test]
fn a_person_sees_tables_and_what_to_type_next() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    uses(&machine, &[(&target, U0, "812")]);
    let line = |words: &str| {
        format!(
            "{} checkpoint {words}",
            crate::support::uni_cumps().display()
        )
    };
    let shown = machine
        .on_a_terminal(&line(&format!("suspend --color never --pid {pid}")))
        .succeeds()
        .text();
    assert!(shown.contains("PID"), "{shown}");
    assert!(shown.contains("checkpointed"), "{shown}");
    assert!(
        shown.contains(&format!("next: uni-cumps checkpoint resume --pid {pid}")),
        "{shown}"
    );
    let status = machine.on_a_terminal(&format!(
        "{} status --color never",
        crate::support::uni_cumps().display()
    ));
    let shown = status.succeeds().text();
    let rows: Vec<&str> = shown.lines().map(str::trim_end).collect();
    let head = rows
        .iter()
        .position(|row| row.starts_with("SUSPENDED"))
        .unwrap();
    let words: Vec<&str> = rows[head + 1].split_whitespace().collect();
    assert_eq!(
        words,
        [&*pid.to_string(), "checkpointed", "sleep", "0", "812"]
    );
}

#[test]
fn completion_offers_the_suspended_processes() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
    let offered = machine
        .run(["--", "uni-cumps", "checkpoint", "resume", "--pid", ""])
        .env("UNI_CUMPS_COMPLETE", "bash")
        .env("_CLAP_COMPLETE_INDEX", "4")
        .succeeds();
    assert!(
        offered.text().contains(&target.pid().to_string()),
        "{offered:#?}"
    );
}
