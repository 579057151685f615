//! What works: a job asks, its tasks share, and nothing stays.

use std::fs;
use std::path::Path;

use crate::Test;
use crate::onebox::{DAEMON, NOBODY, OneBox};
use crate::support::{U0, U1, wait_until};

pub(crate) const TESTS: &[Test] = &[
    (
        "a_job_that_asks_shares_its_gpu_and_leaves_nothing",
        a_job_that_asks,
    ),
    (
        "a_job_that_does_not_ask_gets_nothing",
        a_job_that_does_not_ask,
    ),
    ("limits_of_the_comment_are_those_of_the_tasks", limits),
    ("an_mps_resource_asks_as_well", an_mps_resource),
    ("two_gpus_have_one_daemon_or_one_each", two_gpus),
    ("a_job_of_the_same_user_joins", the_same_user_joins),
    ("another_user_is_kept_apart", another_user),
    ("each_of_two_nodes_has_its_own_daemon", two_nodes),
    ("a_batch_script_and_its_steps_share", a_batch_script),
    (
        "a_job_from_within_a_job_forgets_its_variables",
        a_job_within_a_job,
    ),
    ("a_task_that_is_bound_to_one_core_shares", one_core),
    (
        "a_step_with_a_part_of_the_gpus_gets_these",
        a_part_of_the_gpus,
    ),
    ("install_prints_what_is_installed_here", install),
    ("a_job_shares_through_nvidias_own_daemon", nvidias_own),
];

const SHARE: [&str; 2] = ["--gres=gpu:1", "--comment=cumps:share"];

fn owner(path: &Path) -> u32 {
    std::os::unix::fs::MetadataExt::uid(&fs::metadata(path).unwrap())
}

fn a_job_that_asks(onebox: &OneBox) {
    let job = onebox.running("a", &[&SHARE[..], &["--uid=65534"]].concat());
    assert_eq!(job.variable("CUDA_VISIBLE_DEVICES"), Some(U0));
    let pipe = Path::new(job.variable("CUDA_MPS_PIPE_DIRECTORY").unwrap());
    assert!(pipe.starts_with(onebox.state()));
    assert!(pipe.as_os_str().len() <= 87);
    assert_eq!(owner(pipe), NOBODY);
    assert_eq!(owner(pipe.parent().unwrap()), NOBODY);
    assert_eq!(owner(pipe.parent().unwrap().parent().unwrap()), 0);
    let daemons = onebox.machine.daemons();
    assert_eq!(daemons.len(), 1);
    assert_eq!(owner(Path::new(&format!("/proc/{}", daemons[0]))), NOBODY);
    // A program that misses the daemon fails, and does not take turns.
    assert!(
        onebox
            .gpus()
            .starts_with(&format!("0, {U0}, Exclusive_Process\n"))
    );
    assert_eq!(job.end(), 0);
    onebox.left_nothing();
}

fn a_job_that_does_not_ask(onebox: &OneBox) {
    for options in [
        &[][..],
        &["--gres=gpu:1"],
        &["--gres=gpu:1", "--comment=for Ann"],
    ] {
        let done = onebox.srun(options, "env").succeeds();
        assert!(!done.text().contains("CUDA_MPS"), "{done:?}");
        onebox.is_over();
        assert_eq!(onebox.kept(), Vec::<String>::new());
    }
    assert_eq!(onebox.machine.calls(), "");
}

fn limits(onebox: &OneBox) {
    let options = ["--gres=gpu:2", "--comment=cumps:share,threads=40,memory=8G"];
    let line = "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
    onebox.srun(&options, line).prints("40 0=8192M,1=8192M\n");
    onebox.left_nothing();
}

fn an_mps_resource(onebox: &OneBox) {
    let line = "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_VISIBLE_DEVICES ${CUDA_MPS_PIPE_DIRECTORY:+shared}";
    onebox
        .srun(&["--gres=mps:30"], line)
        .prints("30 GPU-U0 shared\n");
    onebox.left_nothing();
    // Others may have the rest of the GPU, so it is not made exclusive.
    let job = onebox.running("a", &["--gres=mps:30"]);
    assert!(!onebox.gpus().contains("Exclusive"));
    assert_eq!(job.end(), 0);
    onebox.left_nothing();
}

fn two_gpus(onebox: &OneBox) {
    let line = "echo $SLURM_LOCALID $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY >&2; sleep 0.3";
    let shown = |comment: &str| {
        let options = ["--gres=gpu:2", "-n4", comment];
        let done = onebox.srun(&options, line).succeeds();
        let mut lines: Vec<String> = done.stderr.lines().map(str::to_owned).collect();
        lines.sort();
        onebox.left_nothing();
        lines
    };
    let together = shown("--comment=cumps:share");
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(together.len(), 4);
    for line in &together {
        assert_eq!(words(line)[1], format!("{U0},{U1}"));
        assert_eq!(words(line)[2], words(&together[0])[2]);
    }
    let apart = shown("--comment=cumps:share,per-gpu");
    let gpus: Vec<String> = apart.iter().map(|line| words(line)[1].clone()).collect();
    assert_eq!(gpus, [U0, U1, U0, U1]);
    assert_ne!(words(&apart[0])[2], words(&apart[1])[2]);
    assert_eq!(words(&apart[0])[2], words(&apart[2])[2]);
}

fn the_same_user_joins(onebox: &OneBox) {
    let options = ["--gres=mps:20", "--uid=65534"];
    let one = onebox.running("a", &options);
    let other = onebox.running("b", &options);
    let pipe =
        |job: &crate::onebox::Running| job.variable("CUDA_MPS_PIPE_DIRECTORY").unwrap().to_owned();
    assert_ne!(one.job(), other.job());
    assert_eq!(pipe(&one), pipe(&other));
    let daemons = onebox.machine.daemons();
    assert_eq!(daemons.len(), 1);
    assert_eq!(one.end(), 0);
    wait_until("the first job is over", || {
        let jobs = onebox.slurm(&["squeue", "-h"]).finish();
        String::from_utf8_lossy(&jobs.stdout).lines().count() == 1
    });
    assert_eq!(onebox.machine.daemons(), daemons);
    assert_eq!(other.end(), 0);
    onebox.left_nothing();
}

fn another_user(onebox: &OneBox) {
    let one = onebox.running("a", &["--gres=mps:20", "--uid=65534"]);
    let other = onebox.running("b", &["--gres=mps:20", "--uid=1"]);
    let pipe =
        |job: &crate::onebox::Running| job.variable("CUDA_MPS_PIPE_DIRECTORY").unwrap().to_owned();
    assert_ne!(pipe(&one), pipe(&other));
    assert_eq!(onebox.machine.daemons().len(), 2);
    assert_eq!(owner(Path::new(&pipe(&one))), NOBODY);
    assert_eq!(owner(Path::new(&pipe(&other))), DAEMON);
    // Nor can he enter: the directory is all that protects a daemon.
    let pipe_of_other = pipe(&other);
    let ls = onebox
        .machine
        .run([""; 0])
        .instead(["/bin/ls", &pipe_of_other]);
    assert_ne!(ls.user(NOBODY).finish().code, 0);
    assert_eq!(one.end(), 0);
    assert_eq!(other.end(), 0);
    onebox.left_nothing();
}

fn two_nodes(onebox: &OneBox) {
    let words = [
        "srun",
        "-N2",
        "-n2",
        "--gres=gpu:1",
        "--comment=cumps:share",
    ];
    let line = "echo $CUDA_MPS_PIPE_DIRECTORY; sleep 0.3";
    let done = onebox.slurm(&words).with(["/bin/sh", "-c", line]).finish();
    assert_eq!(
        done.code,
        0,
        "{done:?}{}{}",
        onebox.log("n1"),
        onebox.log("n2")
    );
    let text = done.text();
    let mut pipes: Vec<&str> = text.lines().collect();
    pipes.sort_unstable();
    pipes.dedup();
    assert_eq!(pipes.len(), 2, "{done:?}");
    onebox.left_nothing();
}

fn a_batch_script(onebox: &OneBox) {
    let out = onebox.places();
    let script = out.join("job.sh");
    let file = out.join("batch.out");
    let _ = fs::remove_file(&file);
    fs::write(&script, "#!/bin/sh\necho $CUDA_MPS_PIPE_DIRECTORY\nsrun -n1 /bin/sh -c 'echo $CUDA_MPS_PIPE_DIRECTORY'\n").unwrap();
    let output = format!("--output={}", file.display());
    onebox
        .slurm(&["sbatch", "-W", "-w", "n1", &output])
        .with(SHARE)
        .and(script.to_str().unwrap())
        .succeeds();
    let text = fs::read_to_string(&file).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(
        lines[0].ends_with("/pipe") && lines[0] == lines[1],
        "{text}"
    );
    onebox.left_nothing();
}

fn a_job_within_a_job(onebox: &OneBox) {
    let stale = onebox.state().join("daemons/0-0/pipe");
    let stale = stale.to_str().unwrap();
    let line = "echo pipe=$CUDA_MPS_PIPE_DIRECTORY log=$CUDA_MPS_LOG_DIRECTORY $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
    let from_within = |options: &[&str], line: &str| {
        let call = onebox.srun(options, line);
        let call = call.env("CUDA_MPS_PIPE_DIRECTORY", stale);
        let call = call.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "40");
        let call = call.env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=8192M");
        call.env("CUDA_MPS_LOG_DIRECTORY", stale)
    };
    from_within(&["--gres=gpu:1"], line).prints("pipe= log=\n");
    let limits = "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
    from_within(&SHARE, limits).prints("\n");
    from_within(&["--gres=mps:30"], limits).prints("30\n");
    // What the user has set himself is his own.
    let call = onebox.srun(&["--gres=gpu:1"], line);
    call.env("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mine")
        .prints("pipe=/tmp/mine log=\n");
    onebox.left_nothing();
}

fn one_core(onebox: &OneBox) {
    let options = [&SHARE[..], &["--cpu-bind=mask_cpu:0x1"]].concat();
    let line = "grep Cpus_allowed_list /proc/self/status; echo ${CUDA_MPS_PIPE_DIRECTORY:+shared}";
    let done = onebox.srun(&options, line).succeeds();
    assert!(done.text().ends_with("shared\n"), "{done:?}");
    onebox.left_nothing();
}

fn install(onebox: &OneBox) {
    let state = onebox.state();
    let words = ["slurm", "install", "--state-dir", state.to_str().unwrap()];
    let text = onebox.machine.run(words).succeeds().text();
    for line in [
        "Prolog=/etc/slurm/uni-cumps/prolog",
        "TaskProlog=/etc/slurm/uni-cumps/task-prolog",
        "Epilog=/etc/slurm/uni-cumps/epilog",
    ] {
        assert!(text.lines().any(|it| it == line), "{text}");
    }
    // The part for a node, elsewhere than in /etc.
    let (_, commands) = text.split_once("as root:\n").unwrap();
    let place = onebox.machine.path("installed");
    onebox.machine.sh(&commands
        .replace("/etc/slurm/uni-cumps", place.to_str().unwrap())
        .replace(
            "<S>",
            onebox
                .machine
                .path("")
                .to_str()
                .unwrap()
                .trim_end_matches('/'),
        ));
    for hook in ["prolog", "task-prolog", "epilog", "health"] {
        let script = fs::read_to_string(place.join(hook)).unwrap();
        let expected = onebox.ours(hook);
        let (_, expected) = expected.rsplit_once('\n').unwrap();
        assert_eq!(script, format!("#!/bin/sh\n{expected}\n"));
    }
}

fn nvidias_own(onebox: &OneBox) {
    let mps = crate::packages().with_file_name("mps");
    let drivers = ["535", "550", "555"].map(|driver| mps.join(driver).join("usr/bin"));
    let bin = onebox.machine.bin();
    let control = bin.join("nvidia-cuda-mps-control");
    let stand_in = fs::read_link(&control).unwrap();
    let put = |target: &Path| {
        fs::remove_file(&control).unwrap();
        std::os::unix::fs::symlink(target, &control).unwrap();
    };
    for directory in drivers.iter().filter(|directory| directory.exists()) {
        put(&directory.join("nvidia-cuda-mps-control"));
        let options = [&SHARE[..], &["--uid=65534"]].concat();
        let job = onebox.running("a", &options);
        let pipe = job.variable("CUDA_MPS_PIPE_DIRECTORY").unwrap();
        assert_eq!(owner(&Path::new(pipe).join("control")), NOBODY);
        assert_eq!(job.end(), 0);
        onebox.left_nothing();
    }
    put(&stand_in);
}

fn a_part_of_the_gpus(onebox: &OneBox) {
    let places = onebox.places();
    let (script, file) = (places.join("steps.sh"), places.join("steps.out"));
    let step = "srun -n1 --exact --gres=gpu:1 /bin/sh -c 'echo $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY; sleep 1'";
    fs::write(&script, format!("#!/bin/sh\n{step} &\n{step} &\nwait\n")).unwrap();
    for (comment, daemons) in [("cumps:share", 1), ("cumps:share,per-gpu", 2)] {
        let _ = fs::remove_file(&file);
        let output = format!("--output={}", file.display());
        let comment = format!("--comment={comment}");
        let words = [
            "sbatch",
            "-W",
            "-w",
            "n1",
            "-n2",
            "--gres=gpu:2",
            &output,
            &comment,
        ];
        onebox
            .slurm(&words)
            .and(script.to_str().unwrap())
            .succeeds();
        let text = fs::read_to_string(&file).unwrap();
        let mut lines: Vec<(&str, &str)> = text
            .lines()
            .filter_map(|line| line.split_once(' '))
            .collect();
        lines.sort_unstable();
        let gpus: Vec<&str> = lines.iter().map(|(gpu, _)| *gpu).collect();
        assert_eq!(gpus, [U0, U1], "{text}");
        let mut pipes: Vec<&str> = lines.iter().map(|(_, pipe)| *pipe).collect();
        pipes.dedup();
        assert_eq!(pipes.len(), daemons, "{text}");
        onebox.left_nothing();
    }
}
