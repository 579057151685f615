//! `cpus`: which CPUs the processes of each GPU should use, and how large their thread pools may be. Changes nothing, and
//! claims nothing.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::binding;
use crate::claims::{Holder, Locks};
use crate::cli::{CpusArgs, Device};
use crate::cpu_topology;
use crate::cpus::{CpuPlan, CpuSet, Machine, Place, Quota, places, plan};
use crate::error::Error;
use crate::gpu::{Gpu, GpuUuid, PciAddress, Selector, SelectorItem};
use crate::host::{Host, Root};
use crate::nvidia_smi;
use crate::topology;
use crate::ui::{Answer, Cell, Tone, Ui, plain};

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &CpusArgs) -> Result<u8, Error> {
    let root = match &args.root {
        Some(directory) => Root::new(host.root.at(host.cwd.join(directory))),
        None => host.root.clone(),
    };
    let machine = machine(&root, args)?;
    let workers = workers(host, &root, args, &machine)?;
    let plan = plan(args.core, &workers, &machine)?;
    let report = Report {
        workers: workers.len(),
        rows: rows(host, args, &machine),
        nodes: cpu_topology::nodes(&root),
        machine,
        plan,
    };
    ui.answer(&report, args.json);
    Ok(0)
}

/// What is known of the machine, and what the command line puts in its place.
fn machine(root: &Root, args: &CpusArgs) -> Result<Machine, Error> {
    let mask = match &args.mask {
        Some(mask) => mask.clone(),
        None => cpu_topology::process_mask(root)
            .or_else(|| cpu_topology::online(root))
            .ok_or(Error::NoCpuMask)?,
    };
    let mut machine = cpu_topology::machine(root, mask);
    if let Some(cpus) = args.quota {
        machine.quota = Some(Quota {
            cpus,
            file: "--quota".into(),
        });
    }
    Ok(machine)
}

/// The device of each worker.
fn workers(
    host: &Host,
    root: &Root,
    args: &CpusArgs,
    machine: &Machine,
) -> Result<Vec<Option<PciAddress>>, Error> {
    let devices: Vec<Option<PciAddress>> = if !args.device.is_empty() {
        args.device.iter().map(|Device(address)| *address).collect()
    } else if root != &host.root || (args.gpus.is_none() && host.env.visible_devices().is_none()) {
        machine.gpus.iter().map(|gpu| Some(gpu.address)).collect()
    } else {
        let uuids = chosen(host, args.gpus.as_deref())?;
        let addresses = binding::addresses(host, &uuids).map_err(|error| Error::NotBound {
            reason: error.to_string(),
        })?;
        addresses.into_iter().map(Some).collect()
    };
    let each = |device: Option<PciAddress>| std::iter::repeat_n(device, usize::from(args.workers));
    Ok(devices.into_iter().flat_map(each).collect())
}

/// The GPUs that a selector names, or those that the caller's mask shows.
fn chosen(host: &Host, selector: Option<&str>) -> Result<Vec<GpuUuid>, Error> {
    let discovery = nvidia_smi::discover(host)?;
    let mask = host.env.visible_devices();
    let visible = topology::visible(&discovery.gpus, mask.as_deref()).gpus;
    let all = |gpus: &[Gpu]| {
        gpus.iter()
            .filter_map(Gpu::identity)
            .map(|gpu| gpu.uuid.clone())
            .collect()
    };
    match selector.map(topology::parse).transpose()? {
        None => Ok(all(&visible)),
        Some(Selector::All) => Ok(all(&discovery.gpus)),
        Some(Selector::List(items)) => {
            let uuid = |item: &SelectorItem| {
                let plan = discovery.resolve(Some(item.text()), mask.as_deref())?;
                let gpus = plan.devices.into_iter();
                Ok(gpus
                    .map(|device| device.gpu().uuid.clone())
                    .collect::<Vec<_>>())
            };
            let each: Vec<Vec<GpuUuid>> = items.iter().map(uuid).collect::<Result<_, Error>>()?;
            Ok(each.concat())
        }
    }
}

/// A GPU's line of the report.
struct Row {
    place: Place,
    holders: Vec<Holder>,
}

fn rows(host: &Host, args: &CpusArgs, machine: &Machine) -> Vec<Row> {
    let locks = Locks::of(host, args.lock_prefix.as_deref());
    let places: BTreeMap<PciAddress, Place> = places(machine);
    places
        .into_iter()
        .map(|(address, place)| Row {
            // Another machine's GPUs are not claimed on this one.
            holders: match args.root {
                None => locks.holders(&address),
                Some(_) => Vec::new(),
            },
            place,
        })
        .collect()
}

struct Report {
    /// How many workers were to be placed.
    workers: usize,
    machine: Machine,
    plan: CpuPlan,
    rows: Vec<Row>,
    nodes: Vec<(String, CpuSet)>,
}

impl Answer for Report {
    fn to_json(&self) -> Value {
        let Self { machine, plan, .. } = self;
        let worker = |number: usize| match plan.workers.get(number) {
            Some(worker) => json!({"cpus": worker.cpus.to_string(), "why": worker.why}),
            None => Value::Null,
        };
        let workers: Vec<Value> = (0..self.workers).map(worker).collect();
        json!({
            "mask": machine.mask.to_string(),
            "quota": machine.quota.as_ref().map(|quota| quota.cpus),
            "quota_file": machine.quota.as_ref().map(|quota| quota.file.clone()),
            "usable": machine.usable(),
            "plan": {
                "kind": plan.kind.as_str(),
                "workers": workers,
                "service": plan.service,
                "pinned": plan.pinned().to_string(),
                "left": plan.left(),
                "why": plan.why,
            },
            "pools": {
                "preprocess_threads": plan.preprocess_threads(),
                "png_threads": plan.png_threads(),
                "encode_workers": plan.encode_workers(),
                "copy_workers": plan.copy_workers(),
            },
            "gpus": self.rows.iter().map(Row::to_json).collect::<Vec<_>>(),
        })
    }

    fn print(&self, ui: &mut Ui<'_>) {
        let Self { machine, plan, .. } = self;
        ui.line(format!("mask={}", machine.mask));
        match &machine.quota {
            Some(quota) => ui.line(format!(
                "quota={} file={}",
                quota.cpus,
                quota.file.display()
            )),
            None => ui.line("quota=none"),
        }
        ui.line(format!("usable={}", machine.usable()));
        for row in &self.rows {
            ui.line(row.line());
        }
        ui.line(format!(
            "plan kind={} pinned={} left={} why={}",
            plan.kind.as_str(),
            or_none(&plan.pinned()),
            plan.left(),
            plan.why
        ));
        for (number, worker) in plan.workers.iter().enumerate() {
            ui.line(format!(
                "worker number={number} cpus={} why={}",
                worker.cpus, worker.why
            ));
        }
        if let Some(cpu) = plan.service {
            ui.line(format!("service cpu={cpu}"));
        }
        ui.line(format!("pools {}", self.pools()));
    }

    /// For a person: a map of the machine, and below it the GPUs.
    fn show(&self, ui: &mut Ui<'_>) {
        let Self { machine, plan, .. } = self;
        let quota = match &machine.quota {
            Some(quota) => format!(", quota {} CPUs ({})", quota.cpus, quota.file.display()),
            None => String::new(),
        };
        ui.line(format!(
            "CPUs {}{quota}: {} usable, {} left beside the pinned ones",
            machine.mask,
            machine.usable(),
            plan.left()
        ));
        ui.line("");
        ui.table(&["NODE", "CORES"], &self.map());
        ui.line("");
        if !self.rows.is_empty() {
            let rows: Vec<Vec<Cell>> = self
                .rows
                .iter()
                .enumerate()
                .map(|(at, row)| row.cells(at))
                .collect();
            ui.table(
                &[
                    "GPU",
                    "ADDRESS",
                    "NODE",
                    "RANK",
                    "WORKERS",
                    "SERVICE",
                    "CLAIMED BY",
                ],
                &rows,
            );
            ui.line("");
        }
        let tone = if plan.pinned().is_empty() {
            Tone::Doubtful
        } else {
            Tone::Good
        };
        ui.verdict(plan.kind.as_str(), tone, &plan.why);
        ui.line(self.pools());
    }
}

impl Report {
    fn pools(&self) -> String {
        let plan = &self.plan;
        format!(
            "preprocess_threads={} png_threads={} encode_workers={} copy_workers={}",
            plan.preprocess_threads(),
            plan.png_threads(),
            plan.encode_workers(),
            plan.copy_workers()
        )
    }

    /// A row for each NUMA node, a letter for each of its cores: upper case for that of a GPU's first worker, lower case for
    /// its service's, a dot for those that no GPU reserves. CPUs of no known node have a row as well.
    fn map(&self) -> Vec<Vec<Cell>> {
        let cores = self.machine.cores();
        let mut nodes = self.nodes.clone();
        let known = CpuSet::all(nodes.iter().map(|(_, cpus)| cpus));
        let rest = self.machine.mask.difference(&known);
        if !rest.is_empty() {
            let name = if nodes.is_empty() { "all" } else { "?" };
            nodes.push((name.to_owned(), rest));
        }
        nodes
            .iter()
            .map(|(node, cpus)| {
                let own = cores
                    .iter()
                    .filter(|core| core.first().is_some_and(|cpu| cpus.contains(cpu)));
                let letters: Vec<char> = own.map(|core| self.letter(core)).collect();
                let eights = letters.chunks(8).map(String::from_iter);
                vec![plain(node), plain(eights.collect::<Vec<_>>().join(" "))]
            })
            .collect()
    }

    fn letter(&self, core: &CpuSet) -> char {
        let owner = |of: &dyn Fn(&Place) -> bool| self.rows.iter().position(|row| of(&row.place));
        let first = owner(&|place| place.nth(0) == Some(core));
        let service = owner(&|place| place.service.as_ref() == Some(core));
        match (first, service) {
            (Some(at), _) => letter(at),
            (None, Some(at)) => letter(at).to_ascii_lowercase(),
            (None, None) => '.',
        }
    }
}

/// The letter of a GPU on the map.
fn letter(at: usize) -> char {
    u8::try_from(at % 26).map_or('?', |at| char::from(b'A' + at))
}

fn or_none(cpus: &CpuSet) -> String {
    match cpus.is_empty() {
        true => "none".to_owned(),
        false => cpus.to_string(),
    }
}

impl Row {
    fn address(&self) -> String {
        self.place
            .address
            .map(|address| address.to_string())
            .unwrap_or_default()
    }

    fn workers(&self) -> Vec<String> {
        self.place.workers.iter().map(ToString::to_string).collect()
    }

    fn service(&self) -> Option<usize> {
        self.place.service.as_ref().and_then(CpuSet::first)
    }

    fn claimed_by(&self, before_pid: &str, between: &str) -> String {
        let holders = self.holders.iter().map(|holder| match holder.pid {
            Some(pid) => format!("{before_pid}{pid}"),
            None => "somebody".to_owned(),
        });
        holders.collect::<Vec<_>>().join(between)
    }

    fn to_json(&self) -> Value {
        let place = &self.place;
        let holders = self
            .holders
            .iter()
            .map(|holder| json!({"slot": holder.slot, "pid": holder.pid}));
        json!({
            "address": self.address(),
            "node": place.node,
            "allowed": place.pool.to_string(),
            "share": place.share.to_string(),
            "rank": place.rank,
            "of": place.of,
            "workers": self.workers(),
            "service": self.service(),
            "holders": holders.collect::<Vec<_>>(),
        })
    }

    fn line(&self) -> String {
        let place = &self.place;
        format!(
            "gpu address={} node={} allowed={} rank={} of={} workers={} service={} claimed_by={}",
            self.address(),
            place.node.as_deref().unwrap_or("none"),
            or_none(&place.pool),
            place.rank,
            place.of,
            match self.workers().join(";") {
                cores if cores.is_empty() => "none".to_owned(),
                cores => cores,
            },
            self.service()
                .map_or("none".to_owned(), |cpu| cpu.to_string()),
            match self.claimed_by("", ",") {
                by if by.is_empty() => "nobody".to_owned(),
                by => by,
            }
        )
    }

    fn cells(&self, at: usize) -> Vec<Cell> {
        let place = &self.place;
        vec![
            plain(letter(at)),
            plain(self.address()),
            plain(place.node.as_deref().unwrap_or("?")),
            plain(format!("{} of {}", place.rank + 1, place.of)),
            plain(self.workers().join(" ")),
            plain(self.service().map_or(String::new(), |cpu| cpu.to_string())),
            plain(self.claimed_by("pid ", ", ")),
        ]
    }
}
