//! Which daemons a selector means. Pure: it sees the listed GPUs and the caller's mask, and nothing else.

use serde_json::{Value, json};

use crate::error::Error;
use crate::gpu::{Gpu, GpuIdentity, Selector, SelectorItem, entries, parse_index};
use crate::record::TopologyMode;

/// What the caller's `CUDA_VISIBLE_DEVICES` leaves to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visibility {
    /// The visible GPUs, in the mask's order, each once.
    pub gpus: Vec<Gpu>,
    /// What is strange about the mask.
    pub notes: Vec<String>,
}

impl Visibility {
    /// Whether this GPU is among the visible ones.
    pub fn shows(&self, gpu: &GpuIdentity) -> bool {
        self.gpus.iter().any(|seen| seen.identity() == Some(gpu))
    }
}

/// Applies a mask as CUDA does: an entry that names no GPU ends the list. Indices are nvidia-smi's (PCI order). The
/// word `all` is taken as everything, as the Python command takes it.
pub fn visible(gpus: &[Gpu], mask: Option<&str>) -> Visibility {
    let Some(mask) = mask else {
        return Visibility {
            gpus: gpus.to_vec(),
            notes: Vec::new(),
        };
    };
    if mask.trim() == "all" {
        return Visibility {
            gpus: gpus.to_vec(),
            notes: vec!["CUDA itself does not know the word \"all\" and shows no GPU".to_owned()],
        };
    }
    let mut found: Vec<Gpu> = Vec::new();
    let mut notes = Vec::new();
    for entry in entries(mask) {
        match matching(gpus, entry) {
            Ok(gpu) if found.contains(gpu) => {
                notes.push(format!("{entry:?} names a GPU for the second time"));
            }
            Ok(gpu) => found.push(gpu.clone()),
            Err(reason) => {
                notes.push(format!("the list ends before {entry:?}, which {reason}"));
                break;
            }
        }
    }
    Visibility { gpus: found, notes }
}

fn matching<'g>(gpus: &'g [Gpu], entry: &str) -> Result<&'g Gpu, &'static str> {
    if let Some(index) = parse_index(entry) {
        let found = gpus.iter().find(|gpu| gpu.index() == Some(index));
        return found.ok_or("is not the index of a GPU here");
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
        return Ok(gpu);
    }
    let mut candidates = gpus.iter().filter(is_abbreviated);
    match (candidates.next(), candidates.next()) {
        (Some(gpu), None) => Ok(gpu),
        (Some(_), Some(_)) => Err("is the beginning of several UUIDs"),
        (None, _) if entry.starts_with('-') => Err("means no GPU"),
        (None, _) => Err("names no GPU here"),
    }
}

/// What is to be served, before any daemon exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The selector as typed, or `auto`.
    pub selector: String,
    /// How the GPUs are used.
    pub mode: TopologyMode,
    /// The GPU.
    pub gpu: GpuIdentity,
}

impl Plan {
    /// The plan as `doctor --json` reports it.
    pub fn to_json(&self) -> Value {
        json!({
            "selector": self.selector,
            "topology_mode": self.mode.as_str(),
            "gpus": [self.gpu],
        })
    }
}

/// The only entry of a selector.
pub fn only_item(text: &str) -> Result<SelectorItem, Error> {
    let items = match text.parse()? {
        Selector::List(items) => items,
        Selector::All => Vec::new(),
    };
    match <[SelectorItem; 1]>::try_from(items) {
        Ok([item]) => Ok(item),
        Err(_) => Err(Error::SeveralSelected {
            selector: text.trim().to_owned(),
        }),
    }
}

/// Decides which GPU is meant. An explicit selector may name any GPU of the machine; without one, exactly one GPU must
/// be visible under the caller's mask.
pub fn resolve(selector: Option<&str>, gpus: &[Gpu], mask: Option<&str>) -> Result<Plan, Error> {
    let usable: Vec<GpuIdentity> = gpus.iter().filter_map(Gpu::identity).cloned().collect();
    let Some(text) = selector else {
        return sole_visible(&usable, gpus, mask);
    };
    let item = only_item(text)?;
    if usable.is_empty() && gpus.is_empty() {
        return Err(Error::NoGpu { diagnostic: None });
    }
    Ok(Plan {
        selector: item.text().to_owned(),
        mode: TopologyMode::SingleGpu,
        gpu: selected(&item, &usable, gpus)?,
    })
}

fn selected(
    item: &SelectorItem,
    usable: &[GpuIdentity],
    gpus: &[Gpu],
) -> Result<GpuIdentity, Error> {
    let found = usable.iter().find(|gpu| match item {
        SelectorItem::Index(index, _) => gpu.index == *index,
        SelectorItem::Uuid(uuid, _) => gpu.uuid == *uuid,
    });
    if let Some(gpu) = found {
        return Ok(gpu.clone());
    }
    if let SelectorItem::Index(wanted, _) = item {
        for gpu in gpus {
            match gpu {
                Gpu::Unusable {
                    index: Some(index),
                    diagnostic,
                } if index == wanted => return Err(unusable(*index, diagnostic)),
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
    Err(Error::NoSuchGpu {
        selector: item.text().to_owned(),
        usable: usable.to_vec(),
        abbreviated,
    })
}

fn unusable(index: u32, diagnostic: &str) -> Error {
    Error::UnusableGpu {
        index,
        diagnostic: diagnostic.to_owned(),
    }
}

fn sole_visible(usable: &[GpuIdentity], gpus: &[Gpu], mask: Option<&str>) -> Result<Plan, Error> {
    if usable.is_empty() {
        return match gpus.first() {
            Some(Gpu::Unusable {
                index: Some(index),
                diagnostic,
            }) => Err(unusable(*index, diagnostic)),
            _ => Err(Error::NoGpu { diagnostic: None }),
        };
    }
    let visibility = visible(gpus, mask);
    let visible: Vec<GpuIdentity> = visibility
        .gpus
        .iter()
        .filter_map(Gpu::identity)
        .cloned()
        .collect();
    match visible.as_slice() {
        [gpu] => Ok(Plan {
            selector: "auto".to_owned(),
            mode: TopologyMode::SingleGpu,
            gpu: gpu.clone(),
        }),
        [] => Err(Error::MaskHidesAll {
            mask: mask.unwrap_or_default().to_owned(),
            notes: visibility.notes,
        }),
        _ => Err(Error::SeveralGpus { visible }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!((plan.selector.as_str(), plan.gpu.index), ("auto", 1));
        assert!(matches!(
            resolve(None, &machine(), None),
            Err(Error::SeveralGpus { .. })
        ));
        assert!(matches!(
            resolve(None, &machine(), Some("")),
            Err(Error::MaskHidesAll { .. })
        ));
        assert!(matches!(resolve(None, &[], None), Err(Error::NoGpu { .. })));
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
            assert_eq!(plan.gpu.uuid.as_str(), B, "{selector}");
        }
    }

    #[test]
    fn a_selector_that_names_no_single_gpu_is_refused_with_its_reason() {
        let refused = |selector| {
            resolve(Some(selector), &machine(), None)
                .unwrap_err()
                .code()
        };
        assert_eq!(refused("9"), "no-such-gpu");
        assert_eq!(refused("GPU-zz"), "no-such-gpu");
        assert_eq!(refused("0,1"), "several-selected");
        assert_eq!(refused("0,0"), "several-selected");
        assert_eq!(refused(" all "), "several-selected");
        assert_eq!(refused("MIG-x"), "mig-not-supported");
        assert_eq!(refused("bad"), "bad-selector");
        assert_eq!(refused(","), "bad-selector");
        let Err(Error::NoSuchGpu { abbreviated, .. }) = resolve(Some("GPU-0a1b"), &machine(), None)
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
            resolve(Some("1"), &gpus, None).unwrap_err().code(),
            "unusable-gpu"
        );
        assert_eq!(resolve(None, &gpus, None).unwrap().gpu.index, 0);
    }
}
