//! `validate`: proof that a learner and a collector share one GPU through MPS, for a training run's manifest; or that two
//! running processes do.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::attachment;
use crate::cli::{SharingMode, ValidateArgs};
use crate::driver::{self, DriverFailure};
use crate::error::{Error, Unmet};
use crate::gpu::{Gpu, GpuUuid};
use crate::host::Host;
use crate::manifest;
use crate::mps::{self, CONTROL, Control, Keeper, Socket, unless_interrupted};
use crate::nvidia_smi;
use crate::process;
use crate::runtime_dir;
use crate::sharing::{self, Evidence, Request};
use crate::store::Store;
use crate::topology;
use crate::ui::{Ui, python_bool};

/// How long the CUDA driver and the daemon may take each.
const LIMIT: Duration = Duration::from_secs(5);

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &ValidateArgs) -> Result<u8, Error> {
    if !args.pids.is_empty() {
        return together(host, ui, args);
    }
    let request = Request {
        mps: args.mode == SharingMode::Mps,
        learner: args.learner.clone(),
        collector: args.collector.clone(),
        backend: args.backend.clone().unwrap_or_default(),
        rank: args.rank,
        world_size: args.world_size,
    };
    let evidence = match request.mps {
        true => explicit(host, &request)?,
        false => ambient(host, &request),
    };
    // Plain data, which always has a JSON form.
    let value = serde_json::to_value(&evidence).unwrap_or_default();
    if let Some(path) = &args.manifest {
        manifest::merge(host, &host.cwd.join(path), "cuda_process_sharing", &value)?;
    }
    show(ui, &value, args.json);
    Ok(0)
}

fn show(ui: &mut Ui<'_>, value: &Value, json: bool) {
    if json {
        ui.json(value);
        return;
    }
    for (key, value) in value.as_object().into_iter().flatten() {
        match value {
            Value::Null => ui.line(format!("{key}=none")),
            Value::Bool(value) => ui.line(format!("{key}={}", python_bool(*value))),
            Value::String(text) => ui.line(format!("{key}={text}")),
            other => ui.line(format!("{key}={other}")),
        }
    }
}

/// An explicit request: the first prerequisite that is not met is the failure.
fn explicit(host: &Host, request: &Request) -> Result<Evidence, Error> {
    let (learner, collector) = sharing::arguments(request)?;
    let mut evidence = evidence_of(host, request);
    evidence.learner_device = Some(format!("cuda:{learner}"));
    evidence.collector_device = Some(format!("cuda:{collector}"));
    look_at_pipe(host, &mut evidence);
    let learner_gpu = learner_gpu(host, learner)?;
    let collector_gpu = collector_gpu(host, request, collector)?;
    evidence.learner_gpu_uuid = Some(learner_gpu.token());
    evidence.collector_gpu_uuid = Some(collector_gpu.token());
    sharing::same_gpu(&learner_gpu, &collector_gpu)?;
    ask_daemon(host, &mut evidence)?;
    evidence.effective = Some("mps");
    evidence.validated = true;
    Ok(evidence)
}

fn evidence_of(host: &Host, request: &Request) -> Evidence {
    let pipe = host.env.get("CUDA_MPS_PIPE_DIRECTORY");
    Evidence {
        pipe_directory_env: pipe.map(|path| path.to_string_lossy().into_owned()),
        ..Evidence::of(request)
    }
}

fn look_at_pipe(host: &Host, evidence: &mut Evidence) {
    let pipe = runtime_dir::effective_pipe(host);
    let text = |path: &Path| path.to_string_lossy().into_owned();
    evidence.control_pipe = Some(text(&mps::control_path(&pipe)));
    evidence.pipe_directory = Some(text(&pipe));
}

/// The learner's GPU as the CUDA driver names it to a process with this environment.
fn learner_gpu(host: &Host, ordinal: u32) -> Result<GpuUuid, Error> {
    let seen = match driver::look_in_child(host, None, LIMIT) {
        Ok(seen) => seen,
        Err(DriverFailure::NotOpened(_)) if host.root.at("/dev/kfd").exists() => {
            return Err(Unmet::Rocm.into());
        }
        Err(failure) => return Err(Unmet::NoCuda(failure.to_string()).into()),
    };
    let count = seen.devices.len();
    let device = seen.devices.into_iter().nth(ordinal as usize);
    device
        .map(|device| device.uuid)
        .ok_or_else(|| Unmet::OutOfRange { ordinal, count }.into())
}

/// The collector's GPU by nvidia-smi and the mask, as its own process will see it.
fn collector_gpu(host: &Host, request: &Request, ordinal: u32) -> Result<GpuUuid, Error> {
    let unknown = |reason: String| Unmet::CollectorUnknown {
        device: request.collector.clone().unwrap_or_default(),
        reason,
    };
    let found = nvidia_smi::discover(host).map_err(|failure| unknown(failure.to_string()))?;
    let mask = host.env.visible_devices();
    let visibility = topology::visible(&found.gpus, mask.as_deref());
    let visible = visibility
        .gpus
        .get(ordinal as usize)
        .and_then(Gpu::identity);
    match visible {
        Some(gpu) => Ok(gpu.uuid.clone()),
        None if visibility.notes.is_empty() => {
            Err(unknown(format!("{} GPUs are visible", visibility.gpus.len())).into())
        }
        None => Err(unknown(visibility.notes.join("; ")).into()),
    }
}

/// The daemon must be there, open to us, and answer.
fn ask_daemon(host: &Host, evidence: &mut Evidence) -> Result<(), Error> {
    let pipe = runtime_dir::effective_pipe(host);
    let socket = mps::control_socket(host, &pipe);
    let found = socket.describe(&mps::control_path(&pipe));
    match socket {
        Socket::Listening { .. } | Socket::Fifo => {}
        Socket::Absent | Socket::Orphan => return Err(Unmet::NoDaemon(found).into()),
        Socket::Other(_) => return Err(Unmet::NotASocket(found).into()),
        Socket::Hidden(_) => return Err(Unmet::NoAccess(found).into()),
    }
    evidence.control_pipe_kind = socket.kind();
    let control = Control::find(host, &pipe, &pipe).ok_or(Error::NoProgram(CONTROL))?;
    match unless_interrupted(control.servers(LIMIT))? {
        Ok(servers) => evidence.server_pid = servers.first().copied(),
        Err(reason) => return Err(Unmet::NotAnswering { pipe, reason }.into()),
    }
    if let Keeper::Process(process) = mps::keeper(host, &pipe) {
        evidence.control_pid = Some(process.id.pid);
    }
    Ok(())
}

/// A mere look: what cannot be found out stays unknown.
fn ambient(host: &Host, request: &Request) -> Evidence {
    let mut evidence = evidence_of(host, request);
    let learner = sharing::ambient_ordinal(Some(&request.learner));
    let collector = sharing::ambient_ordinal(request.collector.as_deref());
    if learner.is_none() && collector.is_none() {
        return evidence;
    }
    look_at_pipe(host, &mut evidence);
    evidence.ambient_server = ask_daemon(host, &mut evidence).is_ok();
    let token = |gpu: Result<GpuUuid, Error>| gpu.ok().map(|gpu| gpu.token());
    evidence.learner_gpu_uuid = learner.and_then(|ordinal| token(learner_gpu(host, ordinal)));
    evidence.collector_gpu_uuid =
        collector.and_then(|ordinal| token(collector_gpu(host, request, ordinal)));
    evidence
}

/// Where a running process, or one that it started, is a client.
struct Place {
    pid: i32,
    /// The client itself: the process or a descendant.
    client: Option<i32>,
    server: Option<i32>,
    pipe: Option<PathBuf>,
    gpus: Option<String>,
}

/// Are two running processes clients of one server?
fn together(host: &Host, ui: &mut Ui<'_>, args: &ValidateArgs) -> Result<u8, Error> {
    let [first, second] = args.pids.as_slice() else {
        return Err(Unmet::NotTogether("--pid must be given twice".to_owned()).into());
    };
    let places = find(host, [*first, *second])?;
    let shared = match &places {
        [a, b] if a.server.is_none() || b.server.is_none() => Err(format!(
            "pid {} is not a client of any MPS server that can be asked",
            if a.server.is_none() { a.pid } else { b.pid }
        )),
        [a, b] if a.server != b.server => Err(format!(
            "pid {} and pid {} are clients of two MPS servers",
            a.pid, b.pid
        )),
        _ => Ok(()),
    };
    let list: Vec<Value> = places
        .iter()
        .map(|place| {
            json!({
                "pid": place.pid,
                "client_pid": place.client,
                "server_pid": place.server,
                "pipe_directory": place.pipe,
                "gpus": place.gpus,
            })
        })
        .collect();
    if args.json {
        ui.json(
            &json!({"shared": shared.is_ok(), "processes": list, "reason": shared.as_ref().err()}),
        );
    } else {
        for place in &places {
            let number = |pid: Option<i32>| pid.map_or("none".to_owned(), |pid| pid.to_string());
            ui.line(format!(
                "pid={} client={} server={} gpus={}",
                place.pid,
                number(place.client),
                number(place.server),
                place.gpus.as_deref().unwrap_or("none")
            ));
        }
        ui.line(format!("shared={}", python_bool(shared.is_ok())));
    }
    match shared {
        Ok(()) => Ok(0),
        Err(reason) if args.json => {
            ui.note(reason);
            Ok(1)
        }
        Err(reason) => Err(Unmet::NotTogether(reason).into()),
    }
}

/// Looks for each process among the clients of every daemon that we know of.
fn find(host: &Host, pids: [i32; 2]) -> Result<[Place; 2], Error> {
    let families = pids.map(|pid| {
        let descendants = process::descendants_of(host, pid);
        let family: Vec<i32> = descendants
            .iter()
            .map(|process| process.id.pid)
            .chain([pid])
            .collect();
        family
    });
    if let Some(gone) = pids
        .into_iter()
        .find(|pid| process::running(host, *pid).is_none())
    {
        return Err(Unmet::NotTogether(format!("pid {gone} does not run")).into());
    }
    let mut places = pids.map(|pid| Place {
        pid,
        client: None,
        server: None,
        pipe: None,
        gpus: None,
    });
    for (pipe, gpus) in pipes(host)? {
        let control = Control::find(host, &pipe, &pipe).ok_or(Error::NoProgram(CONTROL))?;
        let clients = attachment::clients_of(&control, LIMIT).unwrap_or_default();
        for (place, family) in places.iter_mut().zip(&families) {
            let client = clients.iter().find(|client| family.contains(&client.pid));
            if let (None, Some(client)) = (place.client, client) {
                place.client = Some(client.pid);
                place.server = Some(client.server);
                place.pipe = Some(pipe.clone());
                let visible = || process::variable_of(host, client.server, "CUDA_VISIBLE_DEVICES");
                place.gpus = gpus.clone().or_else(visible);
            }
        }
    }
    Ok(places)
}

/// The pipe directories of the recorded daemons with their GPUs, and the one that the caller's environment names.
fn pipes(host: &Host) -> Result<Vec<(PathBuf, Option<String>)>, Error> {
    let (daemons, _) = crate::daemon::observe_all(host, &Store::of(host)?)?;
    let mut pipes: Vec<(PathBuf, Option<String>)> = daemons
        .into_iter()
        .filter(|daemon| daemon.state.reachable())
        .map(|daemon| {
            let gpus = daemon.record.gpu_list();
            (daemon.record.pipe_directory, Some(gpus))
        })
        .collect();
    let ambient = runtime_dir::effective_pipe(host);
    if !pipes.iter().any(|(pipe, _)| *pipe == ambient) {
        pipes.push((ambient, None));
    }
    Ok(pipes)
}
