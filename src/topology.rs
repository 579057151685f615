//! Which daemons a selector means. Pure: it sees the listed GPUs and the caller's mask, and nothing else.

use serde_json::{Value, json};

use crate::error::Selection;
use crate::gpu::{Device, Gpu, GpuIdentity, Selector, SelectorItem, entries, parse_index};
use crate::limits::Served;
use crate::record::TopologyMode;

/// What the caller's `CUDA_VISIBLE_DEVICES` leaves to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visibility {
    /// The visible GPUs, in the mask's order, each once. One of which a part is visible is among them.
    pub gpus: Vec<Gpu>,
    /// What programs can be given of them, in the mask's order.
    pub devices: Vec<Device>,
    /// What is strange about the mask.
    pub notes: Vec<String>,
}

impl Visibility {
    fn all(gpus: &[Gpu], notes: Vec<String>) -> Self {
        Self {
            gpus: gpus.to_vec(),
            devices: gpus.iter().flat_map(Gpu::devices).collect(),
            notes,
        }
    }

    /// Whether this device is among the visible ones.
    pub fn shows(&self, device: &Device) -> bool {
        self.devices.contains(device)
    }
}

/// Applies a mask as CUDA does: an entry that names no GPU ends the list. Indices are nvidia-smi's (PCI order). The
/// word `all` is taken as everything, as the Python command takes it.
pub fn visible(gpus: &[Gpu], mask: Option<&str>) -> Visibility {
    let Some(mask) = mask else {
        return Visibility::all(gpus, Vec::new());
    };
    if mask.trim() == "all" {
        let note = "CUDA itself does not know the word \"all\" and shows no GPU";
        return Visibility::all(gpus, vec![note.to_owned()]);
    }
    let mut seen = Visibility::all(&[], Vec::new());
    for entry in entries(mask) {
        let (gpu, devices) = match matching(gpus, entry) {
            Ok(found) => found,
            Err(reason) => {
                let note = format!("the list ends before {entry:?}, which {reason}");
                seen.notes.push(note);
                break;
            }
        };
        let is_known = seen.gpus.contains(gpu);
        let is_again = match devices.as_slice() {
            [] => is_known,
            devices => devices.iter().all(|device| seen.shows(device)),
        };
        if is_again {
            let note = format!("{entry:?} names a GPU for the second time");
            seen.notes.push(note);
            continue;
        }
        if !is_known {
            seen.gpus.push(gpu.clone());
        }
        seen.devices.extend(devices);
    }
    seen
}

/// The GPU that an entry of a mask names, and what it shows of it.
fn matching<'g>(gpus: &'g [Gpu], entry: &str) -> Result<(&'g Gpu, Vec<Device>), &'static str> {
    if let Ok(mig) = entry.parse() {
        let is_part = |device: &Device| device.mig().is_some_and(|part| part.uuid == mig);
        let mut parts = gpus
            .iter()
            .filter_map(|gpu| Some((gpu, gpu.devices().into_iter().find(is_part)?)));
        let found = parts.next().map(|(gpu, part)| (gpu, vec![part]));
        return found.ok_or("names no MIG instance here");
    }
    let whole = |gpu: &'g Gpu| Ok((gpu, gpu.devices()));
    if let Some(index) = parse_index(entry) {
        let found = gpus.iter().find(|gpu| gpu.index() == Some(index));
        return found.map_or(Err("is not the index of a GPU here"), whole);
    }
    // A complete UUID in any spelling, or the beginning of exactly one.
    let parsed = entry.parse().ok();
    let is_named = |gpu: &&Gpu| {
        gpu.identity()
            .is_some_and(|gpu| parsed.as_ref() == Some(&gpu.uuid))
    };
    let is_abbreviated = |gpu: &&Gpu| {
        gpu.identity()
            .is_some_and(|gpu| gpu.uuid.is_abbreviated_by(entry))
    };
    if let Some(gpu) = gpus.iter().find(is_named) {
        return whole(gpu);
    }
    let mut candidates = gpus.iter().filter(is_abbreviated);
    match (candidates.next(), candidates.next()) {
        (Some(gpu), None) => whole(gpu),
        (Some(_), Some(_)) => Err("is the beginning of several UUIDs"),
        (None, _) if entry.starts_with('-') => Err("means no GPU"),
        (None, _) => Err("names no GPU here"),
    }
}

/// What one daemon is to serve, before it exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The selector as typed, or `auto`.
    pub selector: String,
    /// How the devices are used.
    pub mode: TopologyMode,
    /// The devices: at least one, and a MIG instance only by itself.
    pub devices: Vec<Device>,
}

impl Plan {
    /// The plan as `doctor --json` reports it.
    pub fn to_json(&self) -> Value {
        let gpus: Vec<&GpuIdentity> = self.devices.iter().map(Device::gpu).collect();
        let mut plan = json!({
            "selector": self.selector,
            "topology_mode": self.mode.as_str(),
            "gpus": gpus,
        });
        if let Some(instance) = self.devices.iter().find_map(Device::mig) {
            plan["mig"] = json!(instance);
        }
        plan
    }

    /// What the daemon serves, in its order.
    pub fn served(&self) -> Served {
        let instance = self.devices.iter().find_map(Device::mig);
        Served {
            gpus: self
                .devices
                .iter()
                .map(|it| it.gpu().uuid.clone())
                .collect(),
            mig: instance.map(|instance| instance.uuid.clone()),
        }
    }

    /// The devices in words.
    pub fn text(&self) -> String {
        let all: Vec<String> = self.devices.iter().map(Device::to_string).collect();
        all.join(", ")
    }

    /// The `CUDA_VISIBLE_DEVICES` of the daemon and of its clients.
    pub fn visible_devices(&self) -> String {
        let uuids: Vec<&str> = self.devices.iter().map(Device::uuid).collect();
        uuids.join(",")
    }
}

/// What a selector says.
pub fn parse(text: &str) -> Result<Selector, Selection> {
    Ok(text.parse()?)
}

/// The only entry of a selector.
fn only_item(text: &str) -> Result<SelectorItem, Selection> {
    let items = match text.parse()? {
        Selector::List(items) => items,
        Selector::All => Vec::new(),
    };
    match <[SelectorItem; 1]>::try_from(items) {
        Ok([item]) => Ok(item),
        Err(_) => Err(several_selected(text)),
    }
}

fn several_selected(text: &str) -> Selection {
    Selection::SeveralSelected {
        selector: text.trim().to_owned(),
    }
}

/// Decides which one device is meant. An explicit selector may name any of the machine; without one, exactly one must be
/// visible under the caller's mask.
pub fn resolve(
    selector: Option<&str>,
    gpus: &[Gpu],
    mask: Option<&str>,
) -> Result<Plan, Selection> {
    let devices = match selector {
        Some(text) => vec![selected(&only_item(text)?, gpus)?],
        None => vec![sole_visible(gpus, mask)?],
    };
    Ok(Plan {
        selector: shown(selector),
        mode: TopologyMode::SingleGpu,
        devices,
    })
}

/// Decides which daemons are meant. A selector of several GPUs means one daemon over them, the word `all` one for each
/// device that the mask shows, unless `mode` says otherwise.
pub fn resolve_all(
    selector: Option<&str>,
    mode: Option<TopologyMode>,
    gpus: &[Gpu],
    mask: Option<&str>,
) -> Result<Vec<Plan>, Selection> {
    let parsed = selector.map(str::parse).transpose()?;
    let (default, devices) = match (parsed, mode) {
        (None, None | Some(TopologyMode::SingleGpu)) => {
            (TopologyMode::SingleGpu, vec![sole_visible(gpus, mask)?])
        }
        (None | Some(Selector::All), _) => (TopologyMode::TaskPerGpu, visible_devices(gpus, mask)?),
        (Some(Selector::List(items)), mode) => {
            let default = match items.len() {
                1 => TopologyMode::SingleGpu,
                _ => TopologyMode::SingleTaskMultiGpu,
            };
            let mut devices = Vec::new();
            for item in &items {
                match selected(item, gpus) {
                    // Where each gets its own daemon, so do the parts of a divided GPU.
                    Err(Selection::Divided { instances, .. })
                        if mode == Some(TopologyMode::TaskPerGpu) && !instances.is_empty() =>
                    {
                        devices.extend(instances);
                    }
                    device => devices.push(device?),
                }
            }
            (default, devices)
        }
    };
    for (at, device) in devices.iter().enumerate() {
        if devices[..at].contains(device) {
            return Err(Selection::Twice(device.clone()));
        }
    }
    let plan = |mode, devices| Plan {
        selector: shown(selector),
        mode,
        devices,
    };
    match mode.unwrap_or(default) {
        TopologyMode::TaskPerGpu => {
            let one = |device| plan(TopologyMode::TaskPerGpu, vec![device]);
            Ok(devices.into_iter().map(one).collect())
        }
        TopologyMode::SingleGpu if devices.len() > 1 => {
            Err(several_selected(selector.unwrap_or_default()))
        }
        TopologyMode::SingleTaskMultiGpu
            if devices.len() > 1 && devices.iter().any(|device| device.mig().is_some()) =>
        {
            Err(Selection::MigAmongSeveral {
                is_mixed: devices.iter().any(|device| device.mig().is_none()),
            })
        }
        mode => Ok(vec![plan(mode, devices)]),
    }
}

/// Why a visible GPU has no device among those that `resolve_all` takes for all. Another selector leaves none out.
pub fn left_out(selector: Option<&str>, gpus: &[Gpu], mask: Option<&str>) -> Vec<Selection> {
    let all = selector.is_none_or(|text| text.parse() == Ok(Selector::All));
    let seen = visible(gpus, mask).gpus.into_iter();
    seen.filter(|gpu| all && gpu.devices().is_empty())
        .filter_map(|gpu| whole(&gpu).err())
        .collect()
}

/// The selector without what does not matter in it.
fn shown(selector: Option<&str>) -> String {
    selector.map_or("auto".to_owned(), |text| {
        entries(text).collect::<Vec<_>>().join(",")
    })
}

fn visible_devices(gpus: &[Gpu], mask: Option<&str>) -> Result<Vec<Device>, Selection> {
    let seen = visible(gpus, mask);
    match (seen.devices.is_empty(), mask) {
        (false, _) => Ok(seen.devices),
        (true, Some(mask)) if gpus.iter().any(|gpu| gpu.identity().is_some()) => {
            Err(Selection::MaskHidesAll {
                mask: mask.to_owned(),
                notes: seen.notes,
            })
        }
        (true, _) => Err(none_at_all(gpus)),
    }
}

fn selected(item: &SelectorItem, gpus: &[Gpu]) -> Result<Device, Selection> {
    let usable = Gpu::identities(gpus);
    if gpus.is_empty() {
        return Err(Selection::NoGpu { diagnostic: None });
    }
    if let SelectorItem::Mig(uuid, text) = item {
        let mut all = gpus.iter().flat_map(Gpu::devices);
        let instances: Vec<Device> = all
            .by_ref()
            .filter(|device| device.mig().is_some())
            .collect();
        let is_it = |device: &&Device| device.mig().is_some_and(|part| part.uuid == *uuid);
        return match instances.iter().find(is_it) {
            Some(device) => Ok(device.clone()),
            None => Err(Selection::NoSuchMig {
                selector: text.clone(),
                instances,
            }),
        };
    }
    let found = gpus.iter().find(|gpu| match (item, gpu.identity()) {
        (SelectorItem::Index(index, _), Some(gpu)) => gpu.index == *index,
        (SelectorItem::Uuid(uuid, _), Some(gpu)) => gpu.uuid == *uuid,
        (_, _) => false,
    });
    if let Some(gpu) = found {
        return whole(gpu);
    }
    if let SelectorItem::Index(wanted, _) = item {
        for gpu in gpus {
            match gpu {
                Gpu::Unusable {
                    index: Some(index),
                    diagnostic,
                } if index == wanted => return Err(unusable(Some(*index), diagnostic)),
                Gpu::Unusable { .. } | Gpu::Usable { .. } => {}
            }
        }
    }
    let mut like = usable
        .iter()
        .filter(|gpu| gpu.uuid.is_abbreviated_by(item.text()));
    let abbreviated = match (like.next(), like.next()) {
        (Some(gpu), None) => Some(gpu.clone()),
        _ => None,
    };
    Err(Selection::NoSuchGpu {
        selector: item.text().to_owned(),
        usable,
        abbreviated,
    })
}

/// A GPU as one device; one that is divided is none.
fn whole(gpu: &Gpu) -> Result<Device, Selection> {
    match gpu {
        Gpu::Usable {
            identity,
            mig: Some(_),
            ..
        } => Err(Selection::Divided {
            gpu: identity.clone(),
            instances: gpu.devices(),
        }),
        Gpu::Usable {
            identity,
            mig: None,
            ..
        } => Ok(Device::Gpu(identity.clone())),
        Gpu::Unusable { index, diagnostic } => Err(unusable(*index, diagnostic)),
    }
}

fn unusable(index: Option<u32>, diagnostic: &str) -> Selection {
    Selection::UnusableGpu {
        index,
        diagnostic: diagnostic.to_owned(),
    }
}

/// Why a machine has nothing to compute on.
fn none_at_all(gpus: &[Gpu]) -> Selection {
    match gpus.first() {
        Some(Gpu::Unusable {
            index: Some(index),
            diagnostic,
        }) => unusable(Some(*index), diagnostic),
        Some(gpu @ Gpu::Usable { .. }) => whole(gpu)
            .err()
            .unwrap_or(Selection::NoGpu { diagnostic: None }),
        _ => Selection::NoGpu { diagnostic: None },
    }
}

fn sole_visible(gpus: &[Gpu], mask: Option<&str>) -> Result<Device, Selection> {
    if !gpus.iter().any(|gpu| gpu.identity().is_some()) {
        return Err(none_at_all(gpus));
    }
    let devices = visible_devices(gpus, mask)?;
    match devices.as_slice() {
        [device] => Ok(device.clone()),
        _ => Err(Selection::SeveralGpus { visible: devices }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    const A: &str = "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40";
    const B: &str = "GPU-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41";

    fn machine() -> Vec<Gpu> {
        [(0, A), (1, B)]
            .map(|(index, uuid)| Gpu::Usable {
                identity: GpuIdentity {
                    index,
                    uuid: uuid.parse().unwrap(),
                },
                compute_mode: crate::gpu::ComputeMode::Default,
                mig: None,
            })
            .to_vec()
    }

    fn seen(mask: Option<&str>) -> Vec<u32> {
        let visibility = visible(&machine(), mask);
        visibility.gpus.iter().filter_map(Gpu::index).collect()
    }

    #[test]
    fn a_mask_is_read_as_cuda_reads_it() {
        for (mask, indices) in [
            (None, vec![0, 1]),
            (Some(""), vec![]),
            (Some("-1"), vec![]),
            (Some("NoDevFiles"), vec![]),
            (Some("none"), vec![]),
            (Some("void"), vec![]),
            (Some("all"), vec![0, 1]),
            (Some("1"), vec![1]),
            (Some("1,0"), vec![1, 0]),
            (Some(" 1 , "), vec![1]),
            (Some("1,1"), vec![1]),
            (Some("0,-1,1"), vec![0]),
            (Some("1,7,0"), vec![1]),
            (Some("7"), vec![]),
            (Some(B), vec![1]),
            (Some("1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41"), vec![1]),
            (Some("GPU-1a1b2c"), vec![1]),
            (Some("GPU-dead"), vec![]),
            (Some(&format!("{B},bad,0")), vec![1]),
            (Some(&format!("0,{A}")), vec![0]),
            (Some("MIG-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41"), vec![]),
        ] {
            assert_eq!(seen(mask), indices, "{mask:?}");
        }
    }

    #[test]
    fn without_a_selector_the_one_visible_gpu_is_meant() {
        let plan = resolve(None, &machine(), Some("1")).unwrap();
        assert_eq!(
            (plan.selector.as_str(), plan.devices[0].gpu().index),
            ("auto", 1)
        );
        assert!(matches!(
            resolve(None, &machine(), None),
            Err(Selection::SeveralGpus { .. })
        ));
        assert!(matches!(
            resolve(None, &machine(), Some("")),
            Err(Selection::MaskHidesAll { .. })
        ));
        assert!(matches!(
            resolve(None, &[], None),
            Err(Selection::NoGpu { .. })
        ));
    }

    #[test]
    fn an_explicit_selector_is_not_bound_by_the_mask() {
        for selector in [
            "1",
            " 1 ",
            "01",
            "1,",
            B,
            "1A1B2C3D-0E4F-5A6B-7C8D-9E0F1A2B3C41",
        ] {
            let plan = resolve(Some(selector), &machine(), Some("0")).unwrap();
            assert_eq!(plan.devices[0].uuid(), B, "{selector}");
        }
    }

    #[test]
    fn a_selector_that_names_no_single_gpu_is_refused_with_its_reason() {
        let refused =
            |selector| Error::from(resolve(Some(selector), &machine(), None).unwrap_err()).code();
        assert_eq!(refused("9"), "no-such-gpu");
        assert_eq!(refused("GPU-zz"), "no-such-gpu");
        assert_eq!(refused("0,1"), "several-selected");
        assert_eq!(refused("0,0"), "several-selected");
        assert_eq!(refused(" all "), "several-selected");
        assert_eq!(refused("MIG-x"), "bad-selector");
        assert_eq!(refused("bad"), "bad-selector");
        assert_eq!(refused(","), "bad-selector");
        let Err(Selection::NoSuchGpu { abbreviated, .. }) =
            resolve(Some("GPU-0a1b"), &machine(), None)
        else {
            panic!("an abbreviation is not accepted")
        };
        assert_eq!(abbreviated.unwrap().uuid.as_str(), A);
    }

    #[test]
    fn a_lost_gpu_is_refused_with_what_nvidia_smi_says_of_it() {
        let mut gpus = machine();
        gpus[1] = Gpu::Unusable {
            index: Some(1),
            diagnostic: "[GPU is lost]".to_owned(),
        };
        assert_eq!(
            Error::from(resolve(Some("1"), &gpus, None).unwrap_err()).code(),
            "unusable-gpu"
        );
        assert_eq!(
            resolve(None, &gpus, None).unwrap().devices[0].gpu().index,
            0
        );
    }
}
