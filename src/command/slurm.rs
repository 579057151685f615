//! `slurm`: the hooks of a cluster's nodes. Slurm gives them no PATH and no arguments, reads only their exit status, and
//! drains the node of a prolog or an epilog that fails.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::cli::{STATE_DIRECTORY, SlurmArgs, SlurmHook};
use crate::error::{Error, SlurmFailure};
use crate::host::Host;
use crate::limits::Limits;
use crate::mps::{self, Socket};
use crate::runner::{Invocation, Mode, RunError};
use crate::shell::quote_path;
use crate::slurm::{Job, JobId, Node, Outcome, Place, node_name};
use crate::ui::Ui;

/// Where the controller is away, squeue waits for it for 9 s.
const SQUEUE_LIMIT: Duration = Duration::from_secs(30);

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &SlurmArgs) -> Result<u8, Error> {
    let node = Node::new(host, &args.state_dir);
    match args.hook {
        SlurmHook::Prolog => node.join(ui, &Job::of(host)?)?,
        SlurmHook::Epilog => node.leave(ui, &JobId::of(host)?)?,
        SlurmHook::TaskProlog => task_prolog(host, ui, &node, args).inspect_err(|error| {
            // Only this line reaches the user: what a task prolog says on standard error is lost.
            ui.verbatim(&format!(
                "print uni-cumps: {}\n",
                one_line(&error.to_string())
            ));
        })?,
        SlurmHook::Health => {
            let name = node_name(host)?;
            let there = jobs_on(host, &name)?;
            node.sweep(ui, &name, &there)?;
        }
        SlurmHook::Install => install(host, ui, args),
    }
    Ok(0)
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn task_prolog(
    host: &Host,
    ui: &mut Ui<'_>,
    node: &Node<'_>,
    args: &SlurmArgs,
) -> Result<(), Error> {
    let Some(record) = node.job(&JobId::of(host)?)? else {
        // A job that was submitted from within another one has that one's variables.
        let pipe = host.env.get_filled("CUDA_MPS_PIPE_DIRECTORY");
        if pipe.is_some_and(|pipe| std::path::Path::new(pipe).starts_with(&args.state_dir)) {
            ui.verbatim("unset CUDA_MPS_PIPE_DIRECTORY\nunset CUDA_MPS_LOG_DIRECTORY\n");
        }
        return Ok(());
    };
    let (places, threads, memory) = match record.outcome {
        Outcome::Refused(reason) => return Err(SlurmFailure::NotShared(reason).into()),
        Outcome::Shared {
            places,
            threads,
            memory,
        } => (places, threads, memory),
    };
    // Tasks go to several daemons in turn.
    let local = host
        .env
        .get_filled("SLURM_LOCALID")
        .and_then(|id| id.to_str());
    let rank: usize = local.and_then(|id| id.parse().ok()).unwrap_or(0);
    let place = places.get(rank % places.len().max(1));
    let place = place.ok_or_else(|| SlurmFailure::NotShared("it has no daemon".to_owned()))?;
    let socket = mps::control_socket(host, &place.pipe);
    if !matches!(socket, Socket::Listening { .. } | Socket::Fifo) {
        let found = socket.describe(&mps::control_path(&place.pipe));
        return Err(SlurmFailure::NotShared(format!("its daemon is gone: {found}")).into());
    }
    let limits = Limits {
        threads,
        memory,
        priority: None,
    };
    let variables = variables(place).into_iter();
    for (key, value) in variables.chain(limits.client_environment(place.gpus.len())) {
        ui.verbatim(&format!("export {key}={value}\n"));
    }
    Ok(())
}

fn variables(place: &Place) -> [(&'static str, String); 3] {
    let gpus: Vec<&str> = place.gpus.iter().map(|gpu| gpu.as_str()).collect();
    [
        ("CUDA_VISIBLE_DEVICES", gpus.join(",")),
        ("CUDA_MPS_PIPE_DIRECTORY", place.pipe.display().to_string()),
        ("CUDA_MPS_LOG_DIRECTORY", place.log.display().to_string()),
    ]
}

/// The jobs that Slurm has on a node, whatever their state. Where it does not say, nothing may be taken for gone.
fn jobs_on(host: &Host, node: &str) -> Result<BTreeSet<u32>, Error> {
    let failed = |reason: String| SlurmFailure::NoJobs {
        node: node.to_owned(),
        reason,
    };
    let squeue = host.find_program("squeue");
    let call = Invocation {
        purpose: "ask for the jobs of the node",
        program: squeue.ok_or_else(|| failed("squeue is not on PATH".to_owned()))?,
        args: ["-h", "-o", "%A", "-w", node].map(Into::into).to_vec(),
        env: host.env.to_vec(),
        stdin: Vec::new(),
        mode: Mode::Captured(SQUEUE_LIMIT),
    };
    let told = match host.runner.run(&call) {
        Err(RunError::Interrupted(signal)) => return Err(Error::Interrupted(signal)),
        Err(error) => return Err(failed(error.to_string()).into()),
        Ok(told) if !told.status.success() => return Err(failed(told.said()).into()),
        Ok(told) => told.stdout,
    };
    let number = |line: &str| {
        let number = line.trim().parse();
        number.map_err(|_| failed(format!("{line:?} is not a job")).into())
    };
    told.lines().map(number).collect()
}

/// What an administrator puts where. slurm.conf takes programs without arguments, so each hook is a file of one line.
fn install(host: &Host, ui: &mut Ui<'_>, args: &SlurmArgs) {
    let binary = quote_path(&host.ourselves);
    let state = match args.state_dir.to_str() {
        Some(STATE_DIRECTORY) => String::new(),
        _ => format!(" --state-dir {}", quote_path(&args.state_dir)),
    };
    ui.verbatim(&format!(
        r#"# slurm.conf
PrologFlags=Alloc
Prolog=/etc/slurm/uni-cumps/prolog
TaskProlog=/etc/slurm/uni-cumps/task-prolog
Epilog=/etc/slurm/uni-cumps/epilog
# and where nodes check their health:
#HealthCheckProgram=/etc/slurm/uni-cumps/health
#HealthCheckInterval=300

# slurm.conf and gres.conf, for jobs that ask with --gres=mps:N instead of a comment:
#GresTypes=gpu,mps
#Name=mps Count=100 File=/dev/nvidia0

# on each node, as root:
mkdir -p /etc/slurm/uni-cumps
for hook in prolog task-prolog epilog health; do
  printf '#!/bin/sh\nexec %s slurm %s%s\n' '{binary}' "$hook" '{state}' > /etc/slurm/uni-cumps/$hook
  chmod 755 /etc/slurm/uni-cumps/$hook
done
"#
    ));
}
