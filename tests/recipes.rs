//! The README's recipes, run as they are printed, on stand-ins for the programs that they start.

#![allow(clippy::unwrap_used)]

#[path = "support/mod.rs"]
mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use support::{Call, Sandbox, our_uid, set_mode, uni_cumps, without_root};

const README: &str = include_str!("../README.md");

/// The fenced blocks of this kind below a heading.
fn blocks(heading: &str, kind: &str) -> Vec<String> {
    let (_, section) = README.split_once(&format!("\n### {heading}\n")).unwrap();
    let section = section.split("\n#").next().unwrap();
    let mut found = Vec::new();
    let mut rest = section;
    while let Some((_, block)) = rest.split_once(&format!("```{kind}\n")) {
        let (text, behind) = block.split_once("```").unwrap();
        found.push(text.to_owned());
        rest = behind;
    }
    assert!(!found.is_empty(), "{heading}: {kind}");
    found
}

/// A machine whose programs are clients of its daemons as soon as they run, and tell what they were given.
fn machine(gpus: usize) -> Sandbox {
    let machine = Sandbox::with_gpus(gpus);
    symlink(uni_cumps(), machine.bin().join("uni-cumps")).unwrap();
    let (clients, told, calls) = (
        machine.path("clients"),
        machine.path("told"),
        machine.bin().join("calls"),
    );
    for file in [&clients, &told] {
        fs::write(file, "").unwrap();
        set_mode(file, 0o666);
    }
    machine.conduct(&format!("servers 4711\nclients-in {}", clients.display()));
    // A learner and a collector work for a while, until each has been asked about.
    machine.script(
        "python",
        &format!(
            "echo \"$1 $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT\" >> {told}
             echo $$ >> {clients}
             case $1 in learner.py | collector.py)
                 asked() {{ grep -A 1 get_client_list {calls} | grep -c \"uni-cumps-$PPID-\"; }}
                 before=$(asked)
                 until [ \"$(asked)\" -gt \"$before\" ]; do sleep 0.02; done
             esac",
            told = told.display(),
            clients = clients.display(),
            calls = calls.display(),
        ),
    );
    machine
}

/// A shell on this machine that has the sandbox's programs and the system's.
fn shell<'m>(machine: &'m Sandbox, script: &str) -> Call<'m> {
    let path = format!("{}:/usr/bin:/bin", machine.bin().display());
    machine
        .run([""; 0])
        .under(["/bin/sh", "-ec", script])
        .env("PATH", path)
}

/// What the programs were given, sorted.
fn told(machine: &Sandbox) -> Vec<String> {
    let told = fs::read_to_string(machine.path("told")).unwrap();
    let mut lines: Vec<String> = told
        .lines()
        .map(|line| machine.normal(line).trim_end().to_owned())
        .collect();
    lines.sort();
    lines
}

#[test]
fn a_learner_and_a_collector_share_a_gpu() {
    let machine = machine(2);
    let [recipe] = &blocks("A learner and a collector on one GPU", "sh")[..] else {
        panic!("one block");
    };
    shell(&machine, recipe).succeeds().said_nothing();
    let pipe = "<S>/t/uni-cumps/gpu-u0/pipe";
    assert_eq!(
        told(&machine),
        [
            format!("collector.py GPU-U0 {pipe} 30 0=8192M"),
            format!("learner.py GPU-U0 {pipe}"),
        ]
    );
    machine.has_no_daemon();
}

#[test]
fn two_users_have_a_daemon_each() {
    if without_root() {
        return;
    }
    let machine = machine(2);
    let recipes = blocks("Two users on one machine", "sh");
    assert_eq!(recipes.len(), 2);
    for (recipe, (user, home)) in recipes.iter().zip([(1001, "alice"), (1002, "bob")]) {
        let home = machine.path(home);
        fs::create_dir(&home).unwrap();
        std::os::unix::fs::chown(&home, Some(user), Some(user)).unwrap();
        set_mode(machine.bin(), 0o1777);
        let calls = machine.bin().join("calls");
        fs::write(&calls, "").unwrap();
        set_mode(&calls, 0o666);
        shell(&machine, recipe)
            .user(user)
            .env("HOME", &home)
            .succeeds()
            .said("started daemon gpu-");
    }
    assert_eq!(
        told(&machine),
        [
            "alices.py GPU-U0 <S>/t/uni-cumps/gpu-u0/pipe",
            "bobs.py GPU-U1 <S>/t/uni-cumps-1002/gpu-u1/pipe",
        ]
    );
    assert_eq!(machine.daemons().len(), 2);
}

#[test]
fn the_systemd_unit_starts_and_stops_its_daemon() {
    let machine = machine(1);
    let [unit] = &blocks("A systemd user unit", "ini")[..] else {
        panic!("one block");
    };
    let command = |key: &str| {
        let line = unit
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .unwrap();
        line.replace("%h/.cargo/bin/", "exec ")
    };
    let service = shell(&machine, &command("ExecStart=")).spawn();
    support::wait_until("the daemon is recorded", || {
        machine.record_file("shared").exists()
    });
    shell(&machine, &command("ExecStop=")).succeeds();
    let ended = service.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(0));
    assert!(!machine.record_file("shared").exists());
}

/// systemd itself finds nothing wrong with the unit.
#[test]
fn systemd_accepts_the_unit() {
    let verify = "/usr/bin/systemd-analyze";
    if !Path::new(verify).exists() {
        let note = b"systemd-analyze is not there: the README's unit is not verified\n";
        std::io::Write::write_all(&mut std::io::stderr(), note).unwrap();
        return;
    }
    let machine = machine(1);
    let unit = blocks("A systemd user unit", "ini").concat();
    let program = machine.bin().join("uni-cumps");
    let unit = unit.replace("%h/.cargo/bin/uni-cumps", program.to_str().unwrap());
    let file = machine.path("cuda-mps.service");
    fs::write(&file, unit).unwrap();
    let output = Command::new(verify)
        .args(["--user", "--man=no", "verify"])
        .arg(&file)
        .env("XDG_RUNTIME_DIR", machine.path("t"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!said.contains("cuda-mps.service"), "{said}");
}

#[test]
fn a_container_gets_the_daemon_or_does_not_start() {
    let machine = machine(1);
    let told = machine.path("told");
    for engine in ["docker", "podman"] {
        machine.script(
            engine,
            &format!("for word; do echo \"$word\"; done >> {}", told.display()),
        );
    }
    let recipe = blocks("docker and podman", "sh").concat();
    let without = shell(&machine, &recipe).finish();
    assert!(
        fs::read_to_string(&told)
            .unwrap()
            .contains("--uni-cumps-has-no-daemon"),
        "{without:?}"
    );
    fs::write(&told, "").unwrap();
    machine.start(&[]);
    shell(&machine, &recipe).succeeds().said_nothing();
    let words = machine.normal(&fs::read_to_string(&told).unwrap());
    let pipe = "<S>/t/uni-cumps/gpu-u0/pipe";
    let flags = format!(
        "--env\nCUDA_VISIBLE_DEVICES=GPU-U0\n--env\nCUDA_MPS_PIPE_DIRECTORY={pipe}\n--env\nCUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log\n--mount\ntype=bind,source={pipe},target={pipe}\n--ipc=host\n--user={}:{}\n",
        our_uid(),
        nix::unistd::getegid()
    );
    let program = "my-image\npython\ntrain.py\n";
    assert_eq!(
        words,
        format!(
            "run\n--rm\n--gpus\nall\n{flags}{program}run\n--rm\n--device\nnvidia.com/gpu=all\n--userns=keep-id\n{flags}{program}"
        )
    );
}

#[test]
fn a_github_job_hands_the_daemon_from_step_to_step() {
    let machine = machine(1);
    let steps = blocks("GitHub Actions", "yaml").concat();
    let steps: Vec<&str> = steps
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- run: "))
        .collect();
    let file = machine.path("github_env");
    fs::write(&file, "").unwrap();
    for step in &steps {
        // As the runner does it: each step in a shell of its own, with the variables that the file has gathered.
        let mut call = shell(&machine, step).env("GITHUB_ENV", &file);
        for line in fs::read_to_string(&file).unwrap().lines() {
            let (key, value) = line.split_once('=').unwrap();
            call = call.env(key, value);
        }
        call.succeeds();
    }
    assert_eq!(steps.len(), 4);
    assert_eq!(
        told(&machine),
        ["train.py GPU-U0 <S>/t/uni-cumps/gpu-u0/pipe"]
    );
    machine.has_no_daemon();
}

#[test]
fn each_rank_is_at_its_own_daemon() {
    let machine = machine(2);
    // As the launchers set them; Open MPI's and Slurm's were read off real ones.
    for (launcher, variables) in [
        (
            "mpirun",
            "OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_LOCAL_SIZE=$2",
        ),
        ("torchrun", "LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$2"),
        (
            "srun",
            "SLURM_LOCALID=$rank SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=$2",
        ),
    ] {
        machine.script(
            launcher,
            &format!(
                "PATH={}:$PATH
                 ranks=$(seq 0 $(($2 - 1)))
                 for rank in $ranks; do
                     (shift 2; [ \"$1\" = --no-python ] && shift; exec env {variables} \"$@\") || exit
                 done",
                machine.bin().display()
            )
            .replace("LOCAL_SIZE=$2", "LOCAL_SIZE=$size")
            .replace("WORLD_SIZE=$2", "WORLD_SIZE=$size")
            .replace("NODE=$2", "NODE=$size")
            .replace("ranks=", "size=$2 ranks="),
        );
    }
    let recipe = blocks("mpirun, torchrun, srun", "sh").concat();
    shell(&machine, &recipe).succeeds().said_nothing();
    let at = |gpu: usize| format!("train.py GPU-U{gpu} <S>/t/uni-cumps/gpu-u{gpu}/pipe");
    // Two ranks of mpirun, one of torchrun and one of srun at each.
    assert_eq!(told(&machine), [vec![at(0); 4], vec![at(1); 4]].concat());
    machine.has_no_daemon();
}

/// Each recipe is run here.
#[test]
fn no_recipe_is_left_out() {
    let (_, recipes) = README.split_once("\n## Recipes\n").unwrap();
    let recipes = recipes.split("\n## ").next().unwrap();
    let headings: Vec<&str> = recipes
        .lines()
        .filter_map(|line| line.strip_prefix("### "))
        .collect();
    assert_eq!(
        headings,
        [
            "A learner and a collector on one GPU",
            "Two users on one machine",
            "A systemd user unit",
            "docker and podman",
            "GitHub Actions",
            "mpirun, torchrun, srun",
        ]
    );
}
