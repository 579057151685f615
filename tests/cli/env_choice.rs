//! Which daemon `env` is for where ranks ask, and what it says besides.

use serde_json::json;

use crate::support::{
    Call, Sandbox, hostname, installed, our_uid, pid, start_ticks, uni_cumps, uuid, without_root,
};

/// The call of a rank whose launcher has set these variables.
fn for_rank<'s>(machine: &'s Sandbox, variables: &[(&str, &str)]) -> Call<'s> {
    let call = machine.run(["env", "--by-rank"]);
    variables
        .iter()
        .fold(call, |call, (key, value)| call.env(key, value))
}

/// The name of the daemon whose environment is printed.
#[track_caller]
fn given(call: Call<'_>) -> String {
    let code = call.succeeds().said_nothing().text();
    let (_, rest) = code.split_once("PIPE_DIRECTORY=<S>/t/uni-cumps/").unwrap();
    rest.split('/').next().unwrap().to_owned()
}

/// Two daemons, whose names and ages say the opposite of their GPUs.
fn two_daemons() -> Sandbox {
    let machine = Sandbox::with_gpus(4);
    machine.start(&["--gpus", "2", "--name", "a"]);
    machine.start(&["--gpus", "1", "--name", "b"]);
    machine
}

#[test]
fn ranks_go_round_the_daemons_in_the_order_of_their_gpus() {
    let machine = Sandbox::with_gpus(4);
    for (gpu, name) in [("2", "a"), ("0", "z"), ("3", "b"), ("1", "10")] {
        machine.start(&["--gpus", gpu, "--name", name]);
    }
    machine.run(["env"]).fails_in_the_shell("several daemons");
    let names = ["z", "10", "a", "b"];
    for size in [1, 2, 3, 4, 8] {
        for rank in 0..size {
            let call = for_rank(
                &machine,
                &[
                    ("LOCAL_RANK", &rank.to_string()),
                    ("LOCAL_WORLD_SIZE", &size.to_string()),
                ],
            );
            assert_eq!(given(call), names[rank % 4], "rank {rank} of {size}");
        }
    }
    let third = for_rank(&machine, &[("LOCAL_RANK", "2")]).prints(
        "export CUDA_VISIBLE_DEVICES=GPU-U2
export CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/a/pipe
export CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/a/log
",
    );
    third.said_nothing();
}

#[test]
fn each_launcher_tells_the_rank() {
    let machine = two_daemons();
    for variables in [
        &[("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")][..],
        &[("LOCAL_RANK", "1"), ("RANK", "0"), ("WORLD_SIZE", "9")],
        &[
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "7,2(x3)"),
            ("SLURM_NODEID", "3"),
        ],
        &[
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ],
        &[("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")],
        &[("PMI_LOCAL_RANK", "1"), ("PMI_LOCAL_SIZE", "4")],
        // torchrun, once on each node of a Slurm job.
        &[
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
            ("SLURM_NODEID", "0"),
            ("LOCAL_RANK", "3"),
            ("LOCAL_WORLD_SIZE", "4"),
        ],
    ] {
        assert_eq!(given(for_rank(&machine, variables)), "a", "{variables:?}");
    }
}

#[test]
fn a_rank_that_cannot_be_told_has_no_daemon() {
    let machine = two_daemons();
    let torchrun = "LOCAL_RANK";
    for (variables, sentence, hint) in [
        (
            &[][..],
            "no launcher has told this process its rank",
            "torchrun, srun or mpirun",
        ),
        (&[("RANK", "1")], "no launcher has told", "--name"),
        (&[(torchrun, "")], "LOCAL_RANK=\"\" is not a rank", "unset"),
        (
            &[(torchrun, "-1")],
            "LOCAL_RANK=\"-1\" is not a rank",
            "unset",
        ),
        (
            &[(torchrun, "\x1b[m")],
            "LOCAL_RANK=\"\\u{1b}[m\" is not a rank",
            "unset LOCAL_RANK",
        ),
        (
            &[(torchrun, "0"), ("PMI_LOCAL_RANK", "1")],
            "two launchers disagree about the rank on the node: LOCAL_RANK=0, PMI_LOCAL_RANK=1",
            "unset LOCAL_RANK",
        ),
        (
            &[(torchrun, "2")],
            "rank LOCAL_RANK=2 has no daemon: 2 are live",
            "start as many daemons",
        ),
        (
            &[(torchrun, "0"), ("LOCAL_WORLD_SIZE", "3")],
            "rank LOCAL_RANK=0 of 3 on this node has no daemon: 2 are live",
            "start as many daemons",
        ),
    ] {
        let done = for_rank(&machine, variables).fails_in_the_shell(sentence);
        done.said(hint);
        let failure = for_rank(&machine, variables).and("--json").finish();
        let failure = failure.exited(1).json();
        let message = failure["error"]["message"].as_str().unwrap();
        assert!(message.contains(sentence), "{message}");
    }
}

#[test]
fn without_a_daemon_no_rank_has_one() {
    let machine = Sandbox::new();
    for_rank(&machine, &[("LOCAL_RANK", "0")]).fails_in_the_shell("no recorded daemon is live");
    machine.start(&["--name", "a"]);
    machine.kill(machine.daemons()[0]);
    for_rank(&machine, &[("LOCAL_RANK", "0")]).fails_in_the_shell("no recorded daemon is live");
}

#[test]
fn a_single_daemon_is_for_every_rank() {
    let machine = Sandbox::new();
    machine.start(&["--name", "a"]);
    for variables in [
        &[("LOCAL_RANK", "0")][..],
        &[("LOCAL_RANK", "6"), ("LOCAL_WORLD_SIZE", "7")],
        &[("PMI_LOCAL_RANK", "99")],
    ] {
        assert_eq!(given(for_rank(&machine, variables)), "a", "{variables:?}");
    }
}

#[test]
fn daemons_that_are_gone_have_no_rank() {
    let machine = two_daemons();
    let gone = machine.start(&["--gpus", "0", "--name", "c"]);
    machine.kill(pid(&gone));
    let first = for_rank(&machine, &[("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")]);
    assert_eq!(given(first), "b");
}

/// The record of a daemon of the Python command, which writes down no indices.
fn python_daemon(machine: &Sandbox, name: &str, gpu: usize, age: f64) {
    let directory = |kind| format!("t/uni-cumps/{name}/{kind}");
    let daemon = machine.start_by_hand(&directory("pipe"), &directory("log"));
    let record = json!({
        "created_at": 1_700_000_000.5 - age,
        "gpu_uuids": [uuid(gpu)],
        "host": hostname(),
        "log_directory": machine.path(directory("log")),
        "name": name,
        "pid": daemon,
        "pipe_directory": machine.path(directory("pipe")),
        "process_start_ticks": start_ticks(daemon),
        "topology_mode": "single_gpu",
        "uid": our_uid(),
    });
    machine.write_record(name, &record);
}

#[test]
fn daemons_of_the_python_command_come_behind_the_others_by_age() {
    let machine = two_daemons();
    python_daemon(&machine, "c", 0, 10.0);
    python_daemon(&machine, "d", 3, 20.0);
    for (rank, name) in ["b", "a", "d", "c"].into_iter().enumerate() {
        let call = for_rank(&machine, &[("LOCAL_RANK", &rank.to_string())]);
        assert_eq!(given(call), name);
    }
}

// What it says besides.

fn daemon_on_the_second_gpu() -> Sandbox {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--gpus", "1", "--name", "a"]);
    machine
}

const CODE: &str = "export CUDA_VISIBLE_DEVICES=GPU-U1
export CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/a/pipe
export CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/a/log
";

#[test]
fn a_mask_of_other_gpus_is_noted() {
    let machine = daemon_on_the_second_gpu();
    for mask in [
        &uuid(0),
        "GPU-0a1b",
        "GPU-0a1b,GPU-2a1b",
        "MIG-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41",
        "-1",
        "NoDevFiles",
        "\x1b]0;x\x07",
    ] {
        let call = machine.run(["env"]).env("CUDA_VISIBLE_DEVICES", mask);
        let done = call
            .prints(CODE)
            .said("note: CUDA_VISIBLE_DEVICES=")
            .said("of your environment names no GPU of daemon a, and is replaced\n");
        assert!(!done.stderr.contains('\x1b'), "{done:?}");
    }
}

#[test]
fn a_mask_that_may_name_the_daemons_gpu_is_not() {
    let machine = daemon_on_the_second_gpu();
    for mask in [
        &uuid(1),
        &uuid(1).to_lowercase(),
        "GPU-1a1b",
        "GPU-0a1b,GPU-1a1b",
        "0",
        "1",
        "7",
        "GPU-0a1b,0",
        "all",
        "",
        " ",
    ] {
        let call = machine.run(["env"]).env("CUDA_VISIBLE_DEVICES", mask);
        call.prints(CODE).said_nothing();
    }
}

#[test]
fn a_client_of_another_ipc_namespace_is_told() {
    if without_root() {
        return;
    }
    let machine = daemon_on_the_second_gpu();
    let other = || machine.run(["env"]).under(["/usr/bin/unshare", "-i"]);
    other()
        .prints(CODE)
        .said("note: daemon a lives in another container or IPC namespace")
        .said("--ipc=");
    other().and("-q").prints(CODE).said_nothing();
}

#[test]
fn somebody_with_another_login_shell_is_told_what_that_takes() {
    let machine = daemon_on_the_second_gpu();
    let with = |shell: &str| machine.run(["env"]).env("SHELL", shell);
    for (shell, name) in [
        ("/usr/bin/fish", "fish"),
        ("/bin/csh", "csh"),
        ("/bin/tcsh", "csh"),
        ("/opt/nu", "nu"),
        ("/opt/pwsh", "powershell"),
        ("elvish", "elvish"),
    ] {
        with(shell).prints(CODE).said(&format!(
            "note: this is for POSIX shells; yours takes uni-cumps env --shell {name}\n"
        ));
    }
    for shell in ["/bin/zsh", "/bin/ksh93", "/usr/sbin/nologin", "", "/"] {
        with(shell).prints(CODE).said_nothing();
    }
    let fish = || with("/usr/bin/fish");
    fish().and("-q").prints(CODE).said_nothing();
    fish()
        .with(["--shell", "posix"])
        .prints(CODE)
        .said_nothing();
    for args in [
        &["--shell", "fish"][..],
        &["--json"],
        &["--format", "docker"],
    ] {
        fish().with(args).succeeds().said_nothing();
    }
    fish().and("--unset").succeeds().said_nothing();
    let failed = fish()
        .and("--name=b")
        .fails_in_the_shell("no daemon named b");
    assert!(!failed.stderr.contains("note: "), "{failed:?}");
}

#[test]
fn the_shell_that_calls_goes_before_the_login_shell() {
    let machine = daemon_on_the_second_gpu();
    let code = "\"$UNI_CUMPS\" env; true";
    let called_by = |shell: &str, arguments: &[&str]| {
        let program = installed(shell)?;
        let call = machine.run([""; 0]).instead([program]).with(arguments);
        Some(call.and(code).env("UNI_CUMPS", uni_cumps()))
    };
    if let Some(call) = called_by("bash", &["-c"]) {
        call.env("SHELL", "/usr/bin/fish")
            .prints(CODE)
            .said_nothing();
    }
    if let Some(call) = called_by("fish", &["--no-config", "-c"]) {
        let done = call.env("SHELL", "/bin/bash").prints(CODE);
        done.said("yours takes uni-cumps env --shell fish");
    }
}
