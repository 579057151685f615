//! Everything that the checks judge, looked up once.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::statvfs::statvfs;

use crate::cpu_topology;
use crate::daemon::{self, Observed};
use crate::driver::{self, DriverFailure, Probe, Seen};
use crate::error::Error;
use crate::gpu::{self, GpuUuid};
use crate::host::Host;
use crate::kernel_module;
use crate::mps::{self, Control, Keeper, Socket, unless_interrupted};
use crate::nvidia_smi::{self, Discovery};
use crate::process;
use crate::runtime_dir;
use crate::store::Store;
use crate::topology::{self, Visibility};

pub use crate::topology::Plan;

/// How long each look may take.
const LIMIT: Duration = Duration::from_secs(5);
/// A server starts with its first client, which takes seconds without persistence mode.
const PROBE_LIMIT: Duration = Duration::from_secs(30);

/// What is known.
pub struct Facts {
    /// The caller.
    pub uid: u32,
    /// `/proc/sys/kernel/osrelease`.
    pub kernel: String,
    /// The container engine whose mark was found.
    pub container: Option<&'static str>,
    /// Which GPU is meant.
    pub plan: Plan,
    /// What nvidia-smi listed.
    pub discovery: Discovery,
    /// The caller's mask, and what it leaves.
    pub mask: Option<String>,
    /// The GPUs under the mask.
    pub visibility: Visibility,
    /// The kernel module's version.
    pub module: Option<String>,
    /// What the CUDA driver shows of the GPU, if it was asked.
    pub cuda: Option<Result<Seen, DriverFailure>>,
    /// What a process saw that went through the daemon, if that was asked for.
    pub probe: Option<Result<Probe, DriverFailure>>,
    /// How many MIG instances the GPU has, if the kernel module tells.
    pub mig: Option<usize>,
    /// The control program.
    pub control: Option<PathBuf>,
    /// The server program.
    pub server: Option<PathBuf>,
    /// The recorded daemons that serve the GPU.
    pub daemons: Vec<Observed>,
    /// The pipe directory that is judged: of our only daemon, or of the caller's environment.
    pub pipe: PathBuf,
    /// Its owner, mode and file system.
    pub pipe_directory: Option<PipeDirectory>,
    /// What stands at the socket's place.
    pub socket: Socket,
    /// Who keeps it.
    pub keeper: Keeper,
    /// The servers, if the daemon was asked and answered.
    pub servers: Option<Result<Vec<Server>, String>>,
    /// The log directory.
    pub logs: Option<Logs>,
    /// The caller's `CUDA_*` variables.
    pub variables: Vec<(String, String)>,
    /// The pipe directory that every CUDA program looks at.
    pub default_pipe: DefaultPipe,
    /// Free bytes of `/dev/shm`.
    pub shared_memory: Option<u64>,
    /// Whether the daemon lives in another IPC namespace.
    pub other_ipc: Option<bool>,
    /// How many CPUs the daemon may use, and how many there are.
    pub cpus: Option<(usize, usize)>,
}

/// The pipe directory as the file system shows it.
pub struct PipeDirectory {
    /// Its owner.
    pub uid: u32,
    /// Its mode.
    pub mode: u32,
    /// The name of its file system, if that is a network one.
    pub network: Option<&'static str>,
}

/// A server and its clients.
pub struct Server {
    /// Its pid.
    pub pid: i32,
    /// Its user, if it can be seen.
    pub uid: Option<u32>,
    /// Its clients' pids and users.
    pub clients: Vec<(i32, Option<u32>)>,
}

/// The log directory's two files.
pub struct Logs {
    /// The directory.
    pub directory: PathBuf,
    /// The end of control.log.
    pub control: Option<String>,
    /// The end of server.log.
    pub server: Option<String>,
    /// Seconds since server.log's last line.
    pub server_idle: u64,
}

/// `/tmp/nvidia-mps`.
pub struct DefaultPipe {
    /// What stands at its socket's place.
    pub socket: Socket,
    /// The directory's owner.
    pub uid: Option<u32>,
}

/// Whether a check with this id is wanted, so that what it needs is looked up.
pub type Wanted<'w> = &'w dyn Fn(&str) -> bool;

/// Looks everything up. Fails only where no GPU can be chosen, or when interrupted.
pub fn gather(host: &Host, selector: Option<&str>, wanted: Wanted<'_>) -> Result<Facts, Error> {
    let discovery = nvidia_smi::discover(host)?;
    let mask = host.env.visible_devices();
    let plan = discovery.resolve_one(selector, mask.as_deref())?;
    let visibility = topology::visible(&discovery.gpus, mask.as_deref());
    let (daemons, _) = daemon::observe_all(host, &Store::of(host)?)?;
    let daemons: Vec<Observed> = daemons
        .into_iter()
        .filter(|daemon| daemon.record.gpu_list() == plan.visible_devices())
        .collect();
    let pipe = judged_pipe(host, &daemons);
    let socket = mps::control_socket(host, &pipe);
    let keeper = mps::keeper(host, &pipe);
    let logs = log_directory(host, &daemons, &keeper);
    let control = Control::find(host, &pipe, logs.as_deref().unwrap_or(&pipe));
    let servers = match &control {
        Some(control) if takes_questions(&socket, &daemons) => Some(ask(host, control)?),
        _ => None,
    };
    let line = |path: &str| {
        let text = fs::read_to_string(host.root.at(path)).ok()?;
        Some(text.trim().to_owned())
    };
    Ok(Facts {
        uid: host.uid,
        kernel: line("/proc/sys/kernel/osrelease").unwrap_or_default(),
        container: container(host),
        module: line("/sys/module/nvidia/version"),
        probe: wanted("probe")
            .then(|| driver::probe_in_child(host, &plan.visible_devices(), &pipe, PROBE_LIMIT)),
        cuda: wanted("cuda-driver")
            .then(|| driver::look_in_child(host, Some(&plan.visible_devices()), LIMIT)),
        mig: mig_instances(host, &plan.devices),
        control: host.find_program(mps::CONTROL),
        server: control.as_ref().and_then(Control::server_program),
        pipe_directory: pipe_directory(host, &pipe),
        servers,
        logs: logs.map(|directory| read_logs(host, directory)),
        variables: variables(host),
        default_pipe: default_pipe(host),
        shared_memory: statvfs(&host.root.at("/dev/shm"))
            .ok()
            .map(|shm| shm.blocks_available() * shm.fragment_size()),
        other_ipc: other_ipc(host, &keeper),
        cpus: cpus(host, &keeper),
        plan,
        discovery,
        mask,
        visibility,
        daemons,
        pipe,
        socket,
        keeper,
    })
}

impl Facts {
    /// Whether these are the devices that a process saw, in their order. A MIG instance is seen under the UUID of its GPU by
    /// some drivers.
    pub fn are_shown(&self, seen: &Seen) -> bool {
        let is_it = |(wanted, found): (&gpu::Device, &driver::Device)| {
            wanted.mig().is_some() || wanted.gpu().uuid == found.uuid
        };
        let wanted = &self.plan.devices;
        seen.devices.len() == wanted.len() && wanted.iter().zip(&seen.devices).all(is_it)
    }

    /// Our daemons that run.
    pub fn running(&self) -> Vec<&Observed> {
        running(&self.daemons)
    }

    /// Whether the caller's programs see the GPU.
    pub fn is_visible(&self) -> bool {
        let mut devices = self.plan.devices.iter();
        devices.all(|device| self.visibility.shows(device))
    }

    /// The value of a variable of the caller.
    pub fn variable(&self, key: &str) -> Option<&str> {
        let found = self.variables.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.as_str())
    }
}

fn running(daemons: &[Observed]) -> Vec<&Observed> {
    daemons
        .iter()
        .filter(|daemon| daemon.state.runs())
        .collect()
}

fn judged_pipe(host: &Host, daemons: &[Observed]) -> PathBuf {
    match running(daemons).as_slice() {
        [daemon] => daemon.record.pipe_directory.clone(),
        _ => runtime_dir::effective_pipe(host),
    }
}

/// A stopped daemon would only keep us waiting.
fn takes_questions(socket: &Socket, daemons: &[Observed]) -> bool {
    let stopped = |daemon: &Observed| {
        daemon
            .state
            .process()
            .is_some_and(|process| process.stopped)
    };
    matches!(socket, Socket::Listening { .. } | Socket::Fifo) && !daemons.iter().any(stopped)
}

fn ask(host: &Host, control: &Control<'_>) -> Result<Result<Vec<Server>, String>, Error> {
    let user = |pid| process::running(host, pid).map(|process| process.uid);
    let pids = match unless_interrupted(control.servers(LIMIT))? {
        Ok(pids) => pids,
        Err(reason) => return Ok(Err(reason)),
    };
    let mut servers = Vec::new();
    for pid in pids {
        let clients = unless_interrupted(control.clients(pid, LIMIT))?;
        // One that has ended meanwhile is left out, and one that does not tell has none.
        let Some(clients) = clients.unwrap_or_else(|_| Some(Vec::new())) else {
            continue;
        };
        let clients = clients.into_iter().map(|client| (client, user(client)));
        servers.push(Server {
            pid,
            uid: user(pid),
            clients: clients.collect(),
        });
    }
    Ok(Ok(servers))
}

/// How many MIG instances the whole GPUs among these devices have. The kernel module shows one as a directory `gi<n>` of
/// the GPU's minor number.
fn mig_instances(host: &Host, devices: &[gpu::Device]) -> Option<usize> {
    let whole = devices.iter().filter(|device| device.mig().is_none());
    whole
        .map(|device| instances_of(host, &device.gpu().uuid))
        .sum()
}

fn instances_of(host: &Host, gpu: &GpuUuid) -> Option<usize> {
    let minors = kernel_module::minors(host);
    let (minor, _) = minors.iter().find(|(_, uuid)| *uuid == gpu)?;
    let mig = host
        .root
        .at(format!("/proc/driver/nvidia/capabilities/gpu{minor}/mig"));
    let Ok(instances) = fs::read_dir(mig) else {
        return Some(0);
    };
    let is_instance = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(b"gi");
    Some(
        instances
            .flatten()
            .filter(|entry| is_instance(&entry.file_name()))
            .count(),
    )
}

fn container(host: &Host) -> Option<&'static str> {
    [("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman")]
        .into_iter()
        .find(|(mark, _)| host.root.at(mark).exists())
        .map(|(_, engine)| engine)
}

fn pipe_directory(host: &Host, pipe: &Path) -> Option<PipeDirectory> {
    let meta = fs::symlink_metadata(host.root.at(pipe)).ok()?;
    meta.is_dir().then(|| PipeDirectory {
        uid: meta.uid(),
        mode: meta.mode() & 0o7777,
        network: runtime_dir::network_file_system_of(host, pipe),
    })
}

/// Of our daemon by its record, of another one by its environment, as far as we may read that.
fn log_directory(host: &Host, daemons: &[Observed], keeper: &Keeper) -> Option<PathBuf> {
    if let [daemon] = running(daemons).as_slice() {
        return Some(daemon.record.log_directory.clone());
    }
    let Keeper::Process(process) = keeper else {
        return None;
    };
    process::variable_of(host, process.id.pid, "CUDA_MPS_LOG_DIRECTORY").map(PathBuf::from)
}

fn read_logs(host: &Host, directory: PathBuf) -> Logs {
    let server_log = host.root.at(directory.join("server.log"));
    let modified = fs::metadata(server_log)
        .and_then(|meta| meta.modified())
        .ok();
    let idle = modified.and_then(|then| host.clock.now().duration_since(then).ok());
    Logs {
        control: mps::log_end(host, &directory, "control.log"),
        server: mps::log_end(host, &directory, "server.log"),
        server_idle: idle.unwrap_or_default().as_secs(),
        directory,
    }
}

fn variables(host: &Host) -> Vec<(String, String)> {
    host.env
        .all()
        .map(|(key, value)| (key.to_string_lossy(), value.to_string_lossy()))
        .filter(|(key, _)| key.starts_with("CUDA_"))
        .map(|(key, value)| (key.into_owned(), value.into_owned()))
        .collect()
}

fn default_pipe(host: &Host) -> DefaultPipe {
    let path = Path::new(runtime_dir::NVIDIA_DEFAULT);
    let meta = fs::symlink_metadata(host.root.at(path)).ok();
    DefaultPipe {
        socket: mps::control_socket(host, path),
        uid: meta.map(|meta| meta.uid()),
    }
}

fn other_ipc(host: &Host, keeper: &Keeper) -> Option<bool> {
    let Keeper::Process(process) = keeper else {
        return None;
    };
    process::shares_namespace(host, process.id.pid, "ipc").map(|shared| !shared)
}

fn cpus(host: &Host, keeper: &Keeper) -> Option<(usize, usize)> {
    let Keeper::Process(process) = keeper else {
        return None;
    };
    let allowed = cpu_topology::allowed(&host.root, &process.id.pid.to_string())?;
    Some((allowed.len(), cpu_topology::online(&host.root)?.len()))
}
