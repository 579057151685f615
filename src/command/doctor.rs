//! `doctor`: which GPU is meant, which daemon serves it, and whether that daemon answers. Changes nothing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::cli::DoctorArgs;
use crate::daemon::{self, Observed, State};
use crate::error::Error;
use crate::host::Host;
use crate::mps::{self, AskError, CONTROL, Control, Keeper, Socket};
use crate::nvidia_smi;
use crate::record::TopologyMode;
use crate::runner::RunError;
use crate::runtime_dir;
use crate::shell::quote_path;
use crate::store::Store;
use crate::topology::{self, Plan};
use crate::ui::{Cell, Tone, Ui, plain};

/// How long a daemon may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

struct Report {
    plan: Plan,
    nvidia_smi: PathBuf,
    daemons: Vec<Observed>,
    /// The daemon that a program for this GPU would use, or why there is none.
    sharing: Result<Sharing, String>,
}

/// What is known about the daemon that answers.
struct Sharing {
    pipe: PathBuf,
    kind: Option<&'static str>,
    pipe_env: Option<String>,
    control_pid: Option<i32>,
    servers: Vec<i32>,
}

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &DoctorArgs) -> Result<u8, Error> {
    let report = gather(host, args)?;
    if args.json {
        ui.json(&report.to_json());
    } else if ui.for_people() {
        report.show(ui);
    } else {
        report.print(ui);
    }
    Ok(u8::from(report.sharing.is_err()))
}

fn gather(host: &Host, args: &DoctorArgs) -> Result<Report, Error> {
    let discovery = nvidia_smi::discover(host)?;
    let mask = host.env.visible_devices();
    let plan = topology::resolve(args.gpus.as_deref(), &discovery.gpus, mask.as_deref())
        .map_err(|error| discovery.explain(error))?;
    let (daemons, _) = daemon::observe_all(host, &Store::of(host)?)?;
    let daemons: Vec<Observed> = daemons
        .into_iter()
        .filter(|daemon| {
            daemon.record.topology_mode == plan.mode
                && daemon.record.gpu_uuids == [plan.gpu.uuid.clone()]
        })
        .collect();
    let visibility = topology::visible(&discovery.gpus, mask.as_deref());
    let is_visible = visibility
        .gpus
        .iter()
        .any(|gpu| gpu.identity() == Some(&plan.gpu));
    let sharing = match (is_visible, mask) {
        (false, Some(mask)) => Err(format!(
            "CUDA_VISIBLE_DEVICES={mask:?} hides GPU {} from the programs of this shell; unset it, or eval \"$(uni-cumps env)\"",
            plan.gpu
        )),
        _ => examine(host, &daemons)?,
    };
    Ok(Report {
        plan,
        nvidia_smi: discovery.program,
        daemons,
        sharing,
    })
}

/// Asks the daemon that serves the GPU: the live one of ours, or else the one that this shell's variables lead to.
fn examine(host: &Host, daemons: &[Observed]) -> Result<Result<Sharing, String>, Error> {
    let running: Vec<&Observed> = daemons
        .iter()
        .filter(|daemon| daemon.state.process().is_some() || daemon.state.reachable())
        .collect();
    let pipe_env = host.env.get_filled("CUDA_MPS_PIPE_DIRECTORY");
    let pipe = match running.as_slice() {
        [] => pipe_env.map_or(PathBuf::from(runtime_dir::NVIDIA_DEFAULT), |path| {
            host.cwd.join(path)
        }),
        [daemon] => match &daemon.state {
            State::NotAnswering(process) => {
                let pid = process.id.pid;
                return Ok(Err(format!(
                    "the daemon {} is stopped (state T) and does not answer; to let it go on: kill -CONT {pid}",
                    daemon.record.name
                )));
            }
            State::Unreachable(_) => {
                let error = daemon::unreachable(daemon);
                let found = error.cause().unwrap_or_default();
                return Ok(Err(format!("{error}: {found}; first {}", error.hint())));
            }
            _ => daemon.record.pipe_directory.clone(),
        },
        several => {
            let names: Vec<&str> = several
                .iter()
                .map(|daemon| daemon.record.name.as_str())
                .collect();
            return Ok(Err(format!(
                "several daemons serve this GPU: {}; stop all but one: uni-cumps stop --name {}",
                names.join(", "),
                names[names.len() - 1]
            )));
        }
    };
    let socket = mps::control_socket(host, &pipe);
    let kind = socket.kind();
    let found = socket.describe(&mps::control_path(&pipe));
    match socket {
        Socket::Listening { .. } | Socket::Fifo => {}
        Socket::Absent | Socket::Orphan => {
            return Ok(Err(format!("{found}; to start a daemon: uni-cumps start")));
        }
        Socket::Other(_) => {
            return Ok(Err(format!(
                "{found}, not a control socket; see {}",
                quote_path(&pipe)
            )));
        }
        Socket::Hidden(_) => return Ok(Err(found)),
    }
    let Some(control) = Control::find(host, &pipe, Path::new("/nonexistent")) else {
        return Ok(Err(format!(
            "{CONTROL} is not on PATH, so the daemon cannot be asked"
        )));
    };
    let servers = match control.servers(ANSWER_LIMIT) {
        Ok(servers) => servers,
        Err(AskError::Call(RunError::Interrupted(signal))) => {
            return Err(Error::Interrupted(signal));
        }
        Err(error) => {
            return Ok(Err(format!(
                "the control daemon in {pipe:?} does not answer: {error}"
            )));
        }
    };
    let control_pid = match mps::keeper(host, &pipe) {
        Keeper::Process(process) => Some(process.id.pid),
        Keeper::Nobody | Keeper::Elsewhere | Keeper::Contradiction(_) => None,
    };
    Ok(Ok(Sharing {
        kind,
        pipe,
        pipe_env: pipe_env.map(|path| path.to_string_lossy().into_owned()),
        control_pid,
        servers,
    }))
}

impl Report {
    fn to_json(&self) -> Value {
        let sharing = match &self.sharing {
            Ok(sharing) => json!({
                "control_pid": sharing.control_pid,
                "control_pipe": mps::control_path(&sharing.pipe),
                "control_pipe_kind": sharing.kind,
                "pipe_directory": sharing.pipe,
                "pipe_directory_env": sharing.pipe_env,
                "server_pid": sharing.servers.first(),
            }),
            Err(reason) => json!({"error": reason}),
        };
        json!({
            "compatible_topology_modes": TopologyMode::ALL.map(TopologyMode::as_str),
            "plan": self.plan.to_json(),
            "managed_daemons": self.daemons.iter().map(Observed::to_json).collect::<Vec<_>>(),
            "cuda_process_sharing": sharing,
            "nvidia_smi": self.nvidia_smi,
            "valid": self.sharing.is_ok(),
        })
    }

    /// The lines of the Python command, and nvidia-smi's path.
    fn print(&self, ui: &mut Ui<'_>) {
        ui.line(format!("topology_mode={}", self.plan.mode.as_str()));
        ui.line(format!("gpus={}", self.plan.gpu.uuid));
        let valid = if self.sharing.is_ok() {
            "True"
        } else {
            "False"
        };
        ui.line(format!("valid={valid}"));
        for daemon in &self.daemons {
            ui.line(daemon.line());
        }
        if let Err(reason) = &self.sharing {
            ui.line(format!("error={reason}"));
        }
        ui.line(format!("nvidia_smi={}", self.nvidia_smi.display()));
    }

    /// For a person.
    fn show(&self, ui: &mut Ui<'_>) {
        let mut rows = vec![
            check("gpu", "ok", Tone::Good, self.plan.gpu.to_string()),
            check(
                "nvidia-smi",
                "ok",
                Tone::Good,
                self.nvidia_smi.display().to_string(),
            ),
        ];
        for daemon in &self.daemons {
            let tone = match daemon.state {
                State::Live(_) => Tone::Good,
                _ => Tone::Doubtful,
            };
            let text = format!("{}, pid {}", daemon.record.name, daemon.record.process.pid);
            rows.push(check("daemon", daemon.state.word(), tone, text));
        }
        rows.push(match &self.sharing {
            Ok(sharing) => {
                let servers = match sharing.servers.as_slice() {
                    [] => "no server yet: the first program starts one".to_owned(),
                    servers => format!("servers {servers:?}"),
                };
                let text = format!("{}; {servers}", sharing.pipe.display());
                check("control", "answers", Tone::Good, text)
            }
            Err(reason) => check("control", "fail", Tone::Bad, reason.clone()),
        });
        ui.table(&["CHECK", "RESULT", "DETAIL"], &rows);
    }
}

fn check(name: &str, result: &str, tone: Tone, detail: String) -> Vec<Cell> {
    vec![plain(name), (result.to_owned(), tone), plain(detail)]
}
