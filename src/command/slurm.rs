//! `slurm`: the hooks of a cluster's nodes. Slurm gives them no PATH and no arguments, reads only their exit status, and
//! drains the node of a prolog or an epilog that fails.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use crate::cli::{STATE_DIRECTORY, SlurmArgs, SlurmHook};
use crate::error::{Error, SlurmFailure};
use crate::host::Host;
use crate::limits::{LIMIT_VARIABLES, Limits};
use crate::mps::{self, Socket};
use crate::record::CLIENT_VARIABLES;
use crate::runner::{Invocation, Mode, RunError};
use crate::shell::quote_path;
use crate::slurm::{Address, Job, JobId, Node, Outcome, gpus_of_step, node_name};
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
            let cause = error
                .cause()
                .map_or(String::new(), |cause| format!(": {cause}"));
            ui.verbatim(&format!(
                "print uni-cumps: {}\n",
                one_line(&format!("{error}{cause}"))
            ));
        })?,
        SlurmHook::Health => {
            let name = node_name(host)?;
            node.sweep(ui, &name, || jobs_on(host, &name))?;
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
    let record = node.job(&JobId::of(host)?)?;
    // A job that was submitted from within another one has that one's variables.
    let [_, pipe, log] = CLIENT_VARIABLES;
    let inherited = host.env.get_filled(pipe);
    if inherited.is_some_and(|pipe| Path::new(pipe).starts_with(&args.state_dir)) {
        let [threads, memory, priority] = LIMIT_VARIABLES;
        let has_mps = record.as_ref().is_some_and(|record| record.has_mps());
        let threads = (!has_mps).then_some(threads);
        for key in threads.into_iter().chain([memory, priority, pipe, log]) {
            ui.verbatim(&format!("unset {key}\n"));
        }
    }
    let Some(record) = record else {
        return Ok(());
    };
    let not_shared = |reason: String| Err(SlurmFailure::NotShared(reason).into());
    if record.uid != host.uid {
        return not_shared(format!(
            "what is recorded is of a job of uid {}",
            record.uid
        ));
    }
    let (daemons, threads, memory) = match record.outcome {
        Outcome::Refused(reason) => return not_shared(reason),
        Outcome::Shared {
            daemons,
            threads,
            memory,
            ..
        } => (daemons, threads, memory),
    };
    // A step may have a part of the job's GPUs.
    let of_step = gpus_of_step(host)?;
    let is_of_step = |number: u32| of_step.as_ref().is_none_or(|gpus| gpus.contains(&number));
    let daemons: Vec<Address> = daemons
        .into_iter()
        .filter_map(|mut daemon| {
            daemon.gpus.retain(|(number, _)| is_of_step(*number));
            (!daemon.gpus.is_empty()).then_some(daemon)
        })
        .collect();
    // Tasks go to several daemons in turn.
    let local = host.env.get_filled("SLURM_LOCALID");
    let local: Option<usize> = local.and_then(|id| id.to_str()?.parse().ok());
    let turn = local.unwrap_or(0) % daemons.len().max(1);
    let Some(daemon) = daemons.get(turn) else {
        return not_shared("the job's daemons serve none of the GPUs of this step".to_owned());
    };
    let socket = mps::control_socket(host, &daemon.pipe);
    if !matches!(socket, Socket::Listening { .. } | Socket::Fifo) {
        let found = socket.describe(&mps::control_path(&daemon.pipe));
        return not_shared(format!("its daemon is gone: {found}"));
    }
    let limits = Limits {
        threads,
        memory,
        priority: None,
    };
    let variables = variables(daemon).into_iter();
    for (key, value) in variables.chain(limits.client_environment(daemon.gpus.len())) {
        ui.verbatim(&format!("export {key}={value}\n"));
    }
    Ok(())
}

fn variables(daemon: &Address) -> [(&'static str, String); 3] {
    let gpus: Vec<&str> = daemon.gpus.iter().map(|(_, gpu)| gpu.as_str()).collect();
    let [visible, pipe, log] = CLIENT_VARIABLES;
    [
        (visible, gpus.join(",")),
        (pipe, daemon.pipe.display().to_string()),
        (log, daemon.log.display().to_string()),
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
  # Written aside and renamed: slurmd may be executing it.
  cat > /etc/slurm/uni-cumps/$hook.new <<END
#!/bin/sh
exec {binary} slurm $hook{state}
END
  chmod 755 /etc/slurm/uni-cumps/$hook.new
  mv -f /etc/slurm/uni-cumps/$hook.new /etc/slurm/uni-cumps/$hook
done
"#
    ));
}
