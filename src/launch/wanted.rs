//! What is asked for, and the daemons that it means.

use std::path::Path;

use super::Wanted;
use crate::compute_mode;
use crate::error::{Error, LimitFailure, Selection};
use crate::gpu::{ComputeMode, Device, Gpu, GpuUuid};
use crate::host::Host;
use crate::limits::{self, Change, Served, Setting};
use crate::mps::{CONTROL, Control};
use crate::nvidia_smi::{self, Discovery};
use crate::process;
use crate::record::{DaemonName, TopologyMode};
use crate::runtime_dir::{self, Directories};
use crate::topology::{self, Plan};

/// What the user asks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'r> {
    /// The GPUs: indices and UUIDs, `all`, or the only visible one.
    pub gpus: Option<&'r str>,
    /// How they are used, where the selector alone would mean something else.
    pub topology: Option<TopologyMode>,
    /// The daemon's label, or the default one of the GPU.
    pub name: Option<&'r str>,
    /// The pipe directory, or the default one.
    pub pipe_dir: Option<&'r Path>,
    /// The log directory, or the default one.
    pub log_dir: Option<&'r Path>,
    /// What its programs may use.
    pub limits: &'r [Setting],
    /// Also for a GPU that another daemon of the user's serves.
    pub force: bool,
    /// Nobody but the daemon's server is to compute on its GPUs.
    pub exclusive: bool,
}

/// One of the daemons that were asked for together.
pub struct Part<'h> {
    /// Its label, where it would have one.
    pub name: Option<DaemonName>,
    /// The daemon, or why it cannot be.
    pub wanted: Result<Wanted<'h>, Error>,
}

impl<'h> Wanted<'h> {
    /// Finds out which GPUs and which directories are meant; calls nvidia-smi. Directories and a name can be told only
    /// to one daemon. Where each device gets its own daemon, one that cannot be planned keeps no other from it.
    pub fn of(host: &'h Host, request: Request<'_>) -> Result<Vec<Part<'h>>, Error> {
        let (mut parts, left_out) = Self::parts(host, request)?;
        match parts.as_mut_slice() {
            [
                Part {
                    wanted: Ok(wanted), ..
                },
            ] if !wanted.is_one_of_several() => wanted.leave_out(left_out),
            _ => parts.extend(left_out.into_iter().map(|error| Part {
                name: None,
                wanted: Err(error.into()),
            })),
        }
        Ok(parts)
    }

    /// Likewise, where only one daemon can be meant.
    pub fn only(host: &'h Host, request: Request<'_>) -> Result<Self, Error> {
        let (mut parts, left_out) = Self::parts(host, request)?;
        match (parts.pop(), parts.is_empty()) {
            (Some(part), true) => {
                let mut wanted = part.wanted?;
                wanted.leave_out(left_out);
                Ok(wanted)
            }
            _ => Err(Error::ForOneDaemon(parts.len() + 1)),
        }
    }

    /// The daemons, and why GPUs that are meant get none.
    fn parts(
        host: &'h Host,
        request: Request<'_>,
    ) -> Result<(Vec<Part<'h>>, Vec<Selection>), Error> {
        let discovery = nvidia_smi::discover(host)?;
        let mask = host.env.visible_devices();
        let plans = discovery.resolve_all(request.gpus, request.topology, mask.as_deref())?;
        let is_particular =
            request.name.is_some() || request.pipe_dir.is_some() || request.log_dir.is_some();
        if plans.len() > 1 && is_particular {
            return Err(Error::ForOneDaemon(plans.len()));
        }
        let changes = changes(request.limits, &plans, &discovery)?;
        let mut left_out = Vec::new();
        // Where a single one is meant, there is no other to leave out.
        if plans
            .iter()
            .all(|plan| plan.mode != TopologyMode::SingleGpu)
        {
            left_out = discovery.left_out(request.gpus, mask.as_deref());
        }
        let mut parts = Vec::new();
        for (plan, limits) in plans.into_iter().zip(changes) {
            let is_one_of_several = plan.mode == TopologyMode::TaskPerGpu;
            let default_name = DaemonName::for_devices(&plan.devices).ok();
            let wanted = match Self::of_plan(host, request, &discovery, plan, limits) {
                // No other could be started either.
                Err(error @ Error::NoProgram(_)) => return Err(error),
                Err(error) if !is_one_of_several => return Err(error),
                wanted => wanted,
            };
            let name = match &wanted {
                Ok(wanted) => Some(wanted.name.clone()),
                Err(_) => default_name,
            };
            parts.push(Part { name, wanted });
        }
        Ok((parts, left_out))
    }

    fn leave_out(&mut self, gpus: Vec<Selection>) {
        self.notes.extend(gpus.into_iter().map(|error| {
            let error = Error::from(error);
            let cause = error.cause().map_or(String::new(), |it| format!(": {it}"));
            format!("a GPU is left out, since {error}{cause}")
        }));
    }

    fn of_plan(
        host: &'h Host,
        request: Request<'_>,
        discovery: &Discovery,
        plan: Plan,
        limits: Vec<Change>,
    ) -> Result<Self, Error> {
        let mask = host.env.visible_devices();
        let name = match request.name {
            Some(name) if !name.is_empty() => name.parse()?,
            _ => DaemonName::for_devices(&plan.devices)?,
        };
        let (directories, path_notes) =
            runtime_dir::plan(host, &name, request.pipe_dir, request.log_dir)?;
        let control = Control::find(host, &directories.pipe, &directories.log)
            .ok_or(Error::NoProgram(CONTROL))?;
        let (compute_modes, mode_notes) = match request.exclusive {
            true if plan.devices.iter().any(|device| device.mig().is_some()) => {
                return Err(Error::ExclusiveMig);
            }
            true => compute_mode::to_change(discovery, &plan.devices),
            false => Default::default(),
        };
        let shared = match request.exclusive {
            true => shared(discovery, &plan.devices),
            false => Vec::new(),
        };
        let asked = [
            ("--pipe-dir", request.pipe_dir, &directories.pipe),
            ("--log-dir", request.log_dir, &directories.log),
        ];
        let places = asked
            .into_iter()
            .filter_map(|(option, asked, path)| asked.map(|_| (option, path.clone())))
            .collect();
        let notes = path_notes
            .into_iter()
            .chain(gpu_notes(discovery, &plan, mask.as_deref()))
            .chain(environment_notes(host, &directories))
            .chain(server_note(&control))
            .chain(mode_notes)
            .collect();
        Ok(Self {
            host,
            plan,
            name,
            directories,
            control,
            here: process::place(host),
            limits,
            force: request.force,
            exclusive: request.exclusive,
            compute_modes,
            shared,
            places,
            notes,
        })
    }
}

/// What the limits mean for each daemon. A GPU that one of several serves concerns that one alone.
fn changes(
    settings: &[Setting],
    plans: &[Plan],
    discovery: &Discovery,
) -> Result<Vec<Vec<Change>>, Error> {
    let numbering = Gpu::identities(&discovery.gpus);
    let all: Vec<Served> = plans.iter().map(Plan::served).collect();
    let is_served = |setting: &Setting| all.iter().any(|one| setting.concerns(one, &numbering));
    let each = all.iter().map(|served| {
        let own: Vec<Setting> = settings
            .iter()
            .filter(|setting| setting.concerns(served, &numbering) || !is_served(setting))
            .cloned()
            .collect();
        limits::changes(&own, served, &numbering).map_err(|misplaced| {
            let devices = all.iter().flat_map(Served::devices).collect();
            LimitFailure::of(misplaced, devices).into()
        })
    });
    each.collect()
}

/// The GPUs of these devices that are not exclusive.
fn shared(discovery: &Discovery, devices: &[Device]) -> Vec<GpuUuid> {
    let gpus = devices.iter().map(|device| &device.gpu().uuid);
    gpus.filter(|uuid| !discovery.is_exclusive(uuid))
        .cloned()
        .collect()
}

/// What the caller should know about the GPU.
fn gpu_notes(discovery: &Discovery, plan: &Plan, mask: Option<&str>) -> Vec<String> {
    let mut notes = discovery.messages.clone();
    for device in &plan.devices {
        let gpu = device.gpu();
        if discovery.compute_mode(gpu) == Some(&ComputeMode::Prohibited) {
            notes.push(format!(
                "GPU {gpu} has compute mode Prohibited and takes no program; an administrator can change it: sudo nvidia-smi -i {} -c DEFAULT",
                gpu.index
            ));
        }
        if let Some(mask) = mask
            && !topology::visible(&discovery.gpus, Some(mask)).shows(device)
        {
            notes.push(format!(
                "CUDA_VISIBLE_DEVICES={mask:?} hides GPU {device}; --gpus goes before it"
            ));
        }
    }
    notes
}

/// The variables of the caller that the daemon does not get, since it would hand them to all its servers.
fn environment_notes(host: &Host, directories: &Directories) -> Vec<String> {
    let ours = [
        ("CUDA_MPS_PIPE_DIRECTORY", &directories.pipe),
        ("CUDA_MPS_LOG_DIRECTORY", &directories.log),
    ];
    let ambient = host.env.all().filter_map(|(key, value)| {
        let key = key.to_str().filter(|key| key.starts_with("CUDA_MPS_"))?;
        let same = ours
            .iter()
            .any(|(name, path)| *name == key && path.as_os_str() == value);
        (!same).then(|| format!("{key}={value:?} of your environment is not passed to the daemon"))
    });
    ambient.collect()
}

fn server_note(control: &Control<'_>) -> Option<String> {
    control.server_program().is_none().then(|| {
        "nvidia-cuda-mps-server was found neither on PATH nor beside the control program: programs will fail with CUDA error 805".to_owned()
    })
}
