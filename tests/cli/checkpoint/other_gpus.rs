//! Processes come back on other GPUs than they were on.

use crate::support::{Sandbox, U0, U1};

use super::{CHECKPOINTED, RUNNING, acts, checkpoint, conditions, target, uses};

#[test]
fn a_process_comes_back_on_another_gpu_however_that_is_spelled() {
    let machine = Sandbox::with_gpus(3);
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    uses(&machine, &[(&target, U0, "812")]);
    let bare = U1.trim_start_matches("GPU-");
    let digits = bare.replace('-', "");
    for words in [
        vec!["--to", "1"],
        vec!["--to", U1],
        vec!["--to", &digits],
        vec!["--gpu-map", "0=1"],
        vec!["--gpu-map", "0=1", "--gpu-map", "1=0", "--gpu-map", "2=2"],
        vec!["--gpu-map", "0=1,1=0"],
    ] {
        checkpoint(&machine, &["suspend"], &[&target]).succeeds();
        machine.cuda_calls();
        let mut all = vec!["resume"];
        all.extend(words);
        checkpoint(&machine, &all, &[&target]).prints(&format!(
            "pid={pid} program=sleep before=checkpointed after=running gpus=GPU-U1 memory_mib=812\n"
        ));
        let map = "GPU-U0=GPU-U1 GPU-U1=GPU-U0 GPU-U2=GPU-U2";
        assert_eq!(
            acts(&machine),
            format!("restore {pid} {map}\nunlock {pid}\n")
        );
    }
}

#[test]
fn a_map_that_changes_nothing_is_not_given_to_the_driver() {
    let machine = Sandbox::with_gpus(2);
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    uses(&machine, &[(&target, U0, "812")]);
    for words in [["--to", "0"], ["--gpu-map", "1=1"]] {
        checkpoint(&machine, &["suspend"], &[&target]).succeeds();
        machine.cuda_calls();
        checkpoint(&machine, &["resume"], &[&target])
            .with(words)
            .succeeds();
        assert_eq!(acts(&machine), format!("restore {pid}\nunlock {pid}\n"));
    }
}

#[test]
fn what_is_no_gpu_and_no_map_is_refused() {
    let machine = Sandbox::with_gpus(2);
    let target = target(&machine, CHECKPOINTED);
    let short = &U0[..U0.len() - 1];
    for (words, sentence) in [
        (
            ["--to", short],
            "has 31 hexadecimal digits; a GPU's UUID has 32",
        ),
        (["--to", "MIG-0a1b2c3d"], "is a MIG instance"),
        (
            ["--to", ""],
            "is neither nvidia-smi's index of a GPU nor a UUID",
        ),
        (["--gpu-map", "0"], "is not of the form OLD=NEW"),
        (
            ["--gpu-map", "0=x"],
            "is neither nvidia-smi's index of a GPU nor a UUID",
        ),
        (["--timeout", "0"], "unexpected argument '--timeout'"),
        (
            ["--deadline", "0"],
            "it must be a number of seconds from 0.001 to 86400",
        ),
        (
            ["--deadline", "inf"],
            "it must be a number of seconds from 0.001 to 86400",
        ),
    ] {
        checkpoint(&machine, &["resume"], &[&target])
            .with(words)
            .breaks_usage()
            .said(sentence);
    }
    checkpoint(&machine, &["resume", "--to=1", "--gpu-map=0=1"], &[&target]).breaks_usage();
    for (words, sentence, hint) in [
        (
            ["--gpu-map=0=7"],
            "this machine has no GPU 7",
            "nvidia-smi -L",
        ),
        (
            ["--gpu-map=0=1,0=0"],
            "is to be replaced by two",
            "each GPU once on each side",
        ),
        (
            ["--gpu-map=0=1,1=1"],
            "is to replace two",
            "each GPU once on each side",
        ),
        // Nobody has told which GPU it was on.
        (
            ["--to=1"],
            "--to needs to know the one GPU that pid",
            "--gpu-map OLD=NEW",
        ),
    ] {
        checkpoint(&machine, &["resume"], &[&target])
            .with(words)
            .fails(sentence)
            .said(hint);
    }
    assert_eq!(acts(&machine), "");
    assert_eq!(machine.cuda_state(target.pid()), CHECKPOINTED);
}

#[test]
fn another_model_of_gpu_is_refused() {
    let machine = Sandbox::with_gpus(2);
    let target = target(&machine, RUNNING);
    uses(&machine, &[(&target, U0, "812")]);
    checkpoint(&machine, &["suspend"], &[&target]).succeeds();
    machine.cuda_calls();
    let gpu = |name, mig| (name, "9999", "Enabled", mig);
    conditions(
        &machine,
        &[
            gpu("NVIDIA H200", "Disabled"),
            gpu("NVIDIA A100", "Disabled"),
        ],
    );
    checkpoint(&machine, &["resume", "--to", "1"], &[&target])
        .fails("a restore needs the same model");
    conditions(
        &machine,
        &[
            gpu("NVIDIA H200", "Disabled"),
            gpu("NVIDIA H200", "Enabled"),
        ],
    );
    checkpoint(&machine, &["resume", "--to", "1"], &[&target])
        .fails("GPU GPU-U1 is divided into MIG instances");
    assert_eq!(acts(&machine), "");
}

#[test]
fn a_driver_of_12_can_suspend_but_not_move() {
    let machine = Sandbox::with_gpus(2);
    let target = target(&machine, RUNNING);
    uses(&machine, &[(&target, U0, "812")]);
    let with =
        |words: &[&str]| checkpoint(&machine, words, &[&target]).env("STUB_CUDA_VERSION", "12080");
    with(&["suspend"]).succeeds();
    with(&["resume", "--to=1"])
        .fails("driver too old: has 12.8, needs 13.0 (r580) to restore on another GPU");
    assert_eq!(machine.cuda_state(target.pid()), CHECKPOINTED);
    with(&["resume"]).succeeds();
}
