//! GPUs as values: the one spelling of a UUID that is stored and compared, that of a PCI address, and what a user may
//! write to select a GPU.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The UUID of a whole GPU in its stored spelling: `GPU-` and lower-case hexadecimal digits, dashed as nvidia-smi prints it.
///
/// `FromStr` takes every spelling in use for one GPU: upper or lower case, with or without the inner dashes behind
/// `GPU-`, and the bare dashed form that torch reports.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct GpuUuid(String);

/// Why a text is not the UUID of a whole GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UuidError {
    /// The text names a MIG instance, which is a part of a GPU.
    #[error("{0:?} is a MIG instance, not a whole GPU")]
    Mig(String),
    /// The text has none of the accepted forms.
    #[error("{0:?} is not a GPU UUID")]
    Malformed(String),
}

const PREFIX: &str = "GPU-";

/// `text` behind `prefix`, whatever the case of the prefix.
fn strip_prefix_ignore_case<'t>(text: &'t str, prefix: &str) -> Option<&'t str> {
    let head = text.get(..prefix.len())?;
    head.eq_ignore_ascii_case(prefix)
        .then(|| &text[prefix.len()..])
}

impl GpuUuid {
    /// The UUID as text, `GPU-…`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The UUID without `GPU-`, as the default daemon name uses it.
    pub fn bare(&self) -> &str {
        &self.0[PREFIX.len()..]
    }

    /// The UUID as manifests of the Python command hold it: upper case, neither dashes nor `GPU-`.
    pub fn token(&self) -> String {
        self.bare().replace('-', "").to_ascii_uppercase()
    }

    /// Whether `entry` is an abbreviation of this UUID as CUDA accepts it in `CUDA_VISIBLE_DEVICES`: `GPU-` and the
    /// first digits, dashes aside.
    pub fn is_abbreviated_by(&self, entry: &str) -> bool {
        let Some(start) = strip_prefix_ignore_case(entry.trim(), PREFIX) else {
            return false;
        };
        let start = start.replace('-', "").to_ascii_lowercase();
        !start.is_empty() && self.bare().replace('-', "").starts_with(&start)
    }
}

impl FromStr for GpuUuid {
    type Err = UuidError;

    fn from_str(text: &str) -> Result<Self, UuidError> {
        let text = text.trim();
        if strip_prefix_ignore_case(text, "MIG-").is_some() {
            return Err(UuidError::Mig(text.to_owned()));
        }
        let malformed = || UuidError::Malformed(text.to_owned());
        let digits = match strip_prefix_ignore_case(text, PREFIX) {
            Some(rest) => rest,
            None if text.len() == 36 && text.matches('-').count() == 4 => text,
            None => return Err(malformed()),
        };
        let digits = digits.replace('-', "").to_ascii_lowercase();
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(malformed());
        }
        if digits.len() != 32 {
            return Ok(Self(format!("{PREFIX}{digits}")));
        }
        Ok(Self(format!("{PREFIX}{}", dashed(&digits))))
    }
}

impl TryFrom<String> for GpuUuid {
    type Error = UuidError;

    fn try_from(text: String) -> Result<Self, UuidError> {
        text.parse()
    }
}

impl From<GpuUuid> for String {
    fn from(uuid: GpuUuid) -> Self {
        uuid.0
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The UUID of a MIG instance, a part of a GPU: `MIG-` and lower-case hexadecimal digits, dashed as nvidia-smi prints it
/// since driver 470.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MigUuid(String);

const MIG: &str = "MIG-";

impl MigUuid {
    /// The UUID as text, `MIG-…`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The UUID without `MIG-`.
    pub fn bare(&self) -> &str {
        &self.0[MIG.len()..]
    }
}

impl FromStr for MigUuid {
    type Err = UuidError;

    fn from_str(text: &str) -> Result<Self, UuidError> {
        let malformed = || UuidError::Malformed(text.trim().to_owned());
        let rest = strip_prefix_ignore_case(text.trim(), MIG).ok_or_else(malformed)?;
        let digits = rest.replace('-', "");
        // As for a GPU, but MIG instances have no abbreviations and no other lengths.
        match digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            true => Ok(Self(format!(
                "{MIG}{}",
                dashed(&digits.to_ascii_lowercase())
            ))),
            false => Err(malformed()),
        }
    }
}

impl TryFrom<String> for MigUuid {
    type Error = UuidError;

    fn try_from(text: String) -> Result<Self, UuidError> {
        text.parse()
    }
}

impl From<MigUuid> for String {
    fn from(uuid: MigUuid) -> Self {
        uuid.0
    }
}

impl fmt::Display for MigUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// 32 digits as a UUID is written.
fn dashed(digits: &str) -> String {
    let (a, b, c) = (&digits[..8], &digits[8..12], &digits[12..16]);
    let (d, e) = (&digits[16..20], &digits[20..]);
    format!("{a}-{b}-{c}-{d}-{e}")
}

/// Where a GPU sits on the PCI bus. Written as sysfs names it, `0000:01:00.0`, and ordered by number.
///
/// `FromStr` takes every spelling in use: sysfs' four or five digits of domain, nvidia-smi's eight, either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// Why a text is not a PCI address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a PCI address such as 0000:01:00.0")]
pub struct PciAddressError(String);

/// A hexadecimal number of as many digits as `lengths` allows.
fn hexadecimal(text: &str, lengths: RangeInclusive<usize>) -> Option<u32> {
    (lengths.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .then(|| u32::from_str_radix(text, 16).ok())
        .flatten()
}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<Self, PciAddressError> {
        let parse = || {
            let (domain, rest) = text.trim().split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            // A bus has 32 devices, and a device 8 functions.
            Some(Self {
                domain: hexadecimal(domain, 4..=8)?,
                bus: u8::try_from(hexadecimal(bus, 2..=2)?).ok()?,
                device: u8::try_from(hexadecimal(device, 2..=2).filter(|number| *number < 32)?)
                    .ok()?,
                function: u8::try_from(hexadecimal(function, 1..=1).filter(|number| *number < 8)?)
                    .ok()?,
            })
        };
        parse().ok_or_else(|| PciAddressError(text.to_owned()))
    }
}

impl TryFrom<String> for PciAddress {
    type Error = PciAddressError;

    fn try_from(text: String) -> Result<Self, PciAddressError> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// A usable GPU: nvidia-smi's index of this moment and the UUID that stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuIdentity {
    /// nvidia-smi's index (PCI order). Another mask or another boot may change it.
    pub index: u32,
    /// The UUID, which is what is stored and passed on.
    pub uuid: GpuUuid,
}

impl fmt::Display for GpuIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "index {} ({})", self.index, self.uuid)
    }
}

/// A part of a GPU in MIG mode that programs see as a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MigInstance {
    /// Its number within its GPU, as `nvidia-smi -L` counts.
    pub number: u32,
    /// Its size, such as `3g.20gb`.
    pub profile: String,
    /// Its UUID, by which programs select it.
    pub uuid: MigUuid,
}

impl fmt::Display for MigInstance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.profile, self.uuid)
    }
}

/// Something that a program can be given to compute on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// A whole GPU.
    Gpu(GpuIdentity),
    /// A part of a GPU.
    Mig(GpuIdentity, MigInstance),
}

impl Device {
    /// The GPU, or the one that it is a part of.
    pub fn gpu(&self) -> &GpuIdentity {
        match self {
            Self::Gpu(gpu) | Self::Mig(gpu, _) => gpu,
        }
    }

    /// The MIG instance, if it is one.
    pub fn mig(&self) -> Option<&MigInstance> {
        match self {
            Self::Gpu(_) => None,
            Self::Mig(_, instance) => Some(instance),
        }
    }

    /// What names it in `CUDA_VISIBLE_DEVICES`.
    pub fn uuid(&self) -> &str {
        match self {
            Self::Gpu(gpu) => gpu.uuid.as_str(),
            Self::Mig(_, instance) => instance.uuid.as_str(),
        }
    }

    /// How nvidia-smi numbers it: the GPU's index, with a MIG instance's own number behind a colon.
    pub fn number(&self) -> String {
        match self {
            Self::Gpu(gpu) => gpu.index.to_string(),
            Self::Mig(gpu, instance) => format!("{}:{}", gpu.index, instance.number),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(gpu) => write!(f, "{gpu}"),
            Self::Mig(gpu, instance) => write!(f, "MIG {instance} of index {}", gpu.index),
        }
    }
}

/// nvidia-smi's `compute_mode` of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes, with or without MPS.
    Default,
    /// One process, which may be an MPS server.
    ExclusiveProcess,
    /// The form of old drivers.
    ExclusiveThread,
    /// No CUDA process at all.
    Prohibited,
    /// The cell held something else, such as `[N/A]`.
    Unknown(String),
}

impl From<&str> for ComputeMode {
    fn from(cell: &str) -> Self {
        match cell {
            "Default" => Self::Default,
            "Exclusive_Process" => Self::ExclusiveProcess,
            "Exclusive_Thread" => Self::ExclusiveThread,
            "Prohibited" => Self::Prohibited,
            other => Self::Unknown(other.to_owned()),
        }
    }
}

impl ComputeMode {
    /// What `nvidia-smi -c` calls it; nothing for what it does not set any more, or never did.
    pub fn argument(&self) -> Option<&'static str> {
        match self {
            Self::Default => Some("DEFAULT"),
            Self::ExclusiveProcess => Some("EXCLUSIVE_PROCESS"),
            Self::Prohibited => Some("PROHIBITED"),
            Self::ExclusiveThread | Self::Unknown(_) => None,
        }
    }
}

impl fmt::Display for ComputeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "Default",
            Self::ExclusiveProcess => "Exclusive_Process",
            Self::ExclusiveThread => "Exclusive_Thread",
            Self::Prohibited => "Prohibited",
            Self::Unknown(_) => "unknown",
        })
    }
}

/// One GPU of the machine as nvidia-smi lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gpu {
    /// A row with an index and a UUID.
    Usable {
        /// Which GPU it is.
        identity: GpuIdentity,
        /// Its compute mode, possibly unknown.
        compute_mode: ComputeMode,
        /// The parts that it is divided into, where it is in MIG mode.
        mig: Option<Vec<MigInstance>>,
    },
    /// A row that cannot be read, such as that of a lost GPU.
    Unusable {
        /// The index, where the row still says one.
        index: Option<u32>,
        /// What nvidia-smi said instead of a UUID.
        diagnostic: String,
    },
}

impl Gpu {
    /// The identity of a usable GPU.
    pub fn identity(&self) -> Option<&GpuIdentity> {
        match self {
            Self::Usable { identity, .. } => Some(identity),
            Self::Unusable { .. } => None,
        }
    }

    /// The identities of those that are usable.
    pub fn identities(gpus: &[Self]) -> Vec<GpuIdentity> {
        gpus.iter().filter_map(Self::identity).cloned().collect()
    }

    /// The devices that programs can be given of it: itself, or its parts.
    pub fn devices(&self) -> Vec<Device> {
        match self {
            Self::Usable {
                identity,
                mig: None,
                ..
            } => vec![Device::Gpu(identity.clone())],
            Self::Usable {
                identity,
                mig: Some(instances),
                ..
            } => instances
                .iter()
                .map(|instance| Device::Mig(identity.clone(), instance.clone()))
                .collect(),
            Self::Unusable { .. } => Vec::new(),
        }
    }

    /// nvidia-smi's index, where one is known.
    pub fn index(&self) -> Option<u32> {
        match self {
            Self::Usable { identity, .. } => Some(identity.index),
            Self::Unusable { index, .. } => *index,
        }
    }
}

/// What `--gpus` says, before it is compared with the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// `all`.
    All,
    /// One or more GPUs, in the order given.
    List(Vec<SelectorItem>),
}

/// One entry of a selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SelectorItem {
    /// nvidia-smi's index, with the text as it was typed.
    Index(u32, String),
    /// A UUID, with the text as it was typed.
    Uuid(GpuUuid, String),
    /// That of a MIG instance, likewise.
    Mig(MigUuid, String),
}

impl SelectorItem {
    /// The entry as it was typed.
    pub fn text(&self) -> &str {
        match self {
            Self::Index(_, text) | Self::Uuid(_, text) | Self::Mig(_, text) => text,
        }
    }
}

/// Why a text is not a selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// Nothing but blanks and commas.
    #[error("the GPU selector is empty")]
    Empty,
    /// An entry is neither an index nor a UUID.
    #[error(transparent)]
    Uuid(#[from] UuidError),
}

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        if text.trim() == "all" {
            return Ok(Self::All);
        }
        let items = entries(text)
            .map(|entry| match (parse_index(entry), entry.parse()) {
                (Some(index), _) => Ok(SelectorItem::Index(index, entry.to_owned())),
                (None, Ok(mig)) => Ok(SelectorItem::Mig(mig, entry.to_owned())),
                (None, Err(_)) => match entry.parse() {
                    Ok(uuid) => Ok(SelectorItem::Uuid(uuid, entry.to_owned())),
                    Err(UuidError::Mig(text) | UuidError::Malformed(text)) => {
                        Err(UuidError::Malformed(text).into())
                    }
                },
            })
            .collect::<Result<Vec<_>, SelectorError>>()?;
        if items.is_empty() {
            return Err(SelectorError::Empty);
        }
        Ok(Self::List(items))
    }
}

/// Whether a mask names GPUs by UUID, and none of these. What an index means only nvidia-smi knows.
pub fn names_none_of(mask: &str, gpus: &[GpuUuid]) -> bool {
    let names_one = |entry: &str| {
        let uuid = entry.parse().ok();
        parse_index(entry).is_some()
            || entry == "all"
            || gpus
                .iter()
                .any(|gpu| gpu.is_abbreviated_by(entry) || uuid.as_ref() == Some(gpu))
    };
    entries(mask).next().is_some() && !entries(mask).any(names_one)
}

/// The entries of a comma-separated list, without blanks and empty ones.
pub fn entries(list: &str) -> impl Iterator<Item = &str> {
    list.split(',')
        .map(str::trim)
        .filter(|entry| !entry.is_empty())
}

/// A decimal index in ASCII digits; anything else is not an index.
pub fn parse_index(text: &str) -> Option<u32> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()))
        .then(|| text.parse().unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40";

    #[test]
    fn every_spelling_of_a_uuid_is_one_gpu() {
        for spelling in [
            "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
            "GPU-0A1B2C3D-0E4F-5A6B-7C8D-9E0F1A2B3C40",
            "gpu-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
            "0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
            "0A1B2C3D-0E4F-5A6B-7C8D-9E0F1A2B3C40",
            "GPU-0a1b2c3d0e4f5a6b7c8d9e0f1a2b3c40",
            "  GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40\t",
        ] {
            assert_eq!(
                spelling.parse::<GpuUuid>().unwrap().as_str(),
                A,
                "{spelling}"
            );
        }
    }

    #[test]
    fn the_canonical_forms_of_the_reference_are_kept() {
        for (text, canonical) in [
            ("GPU-AB-cd", "GPU-abcd"),
            (" gpu-ABCD ", "GPU-abcd"),
            ("gpu-GPU-x", "GPU-gpux"),
            ("GPU-g", "GPU-g"),
            (
                "AAAAAAAA-BBBB-CCCC-DDDD-EEEEEEEEEEEE",
                "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee",
            ),
        ] {
            assert_eq!(text.parse::<GpuUuid>().unwrap().as_str(), canonical);
        }
    }

    #[test]
    fn what_is_not_a_uuid_is_refused() {
        for text in [
            "",
            "x",
            "GPU-",
            "gpu-",
            "[N/A]",
            "[GPU is lost]",
            "GPU-\u{fffd}",
            "GPU-a b",
            "0a1b2c3d0e4f5a6b7c8d9e0f1a2b3c40",
            "é",
        ] {
            assert!(
                matches!(text.parse::<GpuUuid>(), Err(UuidError::Malformed(_))),
                "{text}"
            );
        }
        for text in ["MIG-GPU-x", "mig-x"] {
            assert!(
                matches!(text.parse::<GpuUuid>(), Err(UuidError::Mig(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn every_spelling_of_a_pci_address_is_that_of_sysfs() {
        for (text, canonical) in [
            ("0000:01:00.0", "0000:01:00.0"),
            ("00000000:01:00.0", "0000:01:00.0"),
            ("0000:CA:1F.7", "0000:ca:1f.7"),
            (" 00000001:c1:00.0\n", "0001:c1:00.0"),
            ("10000:e1:00.0", "10000:e1:00.0"),
            ("00010000:E1:00.0", "10000:e1:00.0"),
        ] {
            let address: PciAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), canonical, "{text}");
        }
        for text in [
            "",
            "[N/A]",
            "01:00.0",
            "0000:01:00",
            "0000:01:20.0",
            "0000:01:00.8",
            "0000:1:00.0",
            "000:01:00.0",
            "000000000:01:00.0",
            "0000:+1:00.0",
            "0000:01:00.0.0",
            "0000:é:00.0",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn pci_addresses_are_ordered_by_number() {
        let order = [
            "0000:01:00.0",
            "0000:01:00.1",
            "0000:02:00.0",
            "0000:c1:00.0",
            "0001:01:00.0",
            "2000:00:00.0",
            "10000:01:00.0",
        ]
        .map(|text| text.parse::<PciAddress>().unwrap());
        assert!(order.is_sorted());
    }

    #[test]
    fn cuda_takes_the_beginning_of_a_uuid() {
        let uuid: GpuUuid = A.parse().unwrap();
        for entry in [
            "GPU-0a1b",
            "gpu-0A1B2C3D",
            "GPU-0a1b2c3d-0e",
            "GPU-0a1b2c3d0e",
            A,
        ] {
            assert!(uuid.is_abbreviated_by(entry), "{entry}");
        }
        for entry in ["GPU-", "GPU-1a", "0a1b", ""] {
            assert!(!uuid.is_abbreviated_by(entry), "{entry}");
        }
    }

    #[test]
    fn selectors_are_indices_uuids_or_all() {
        assert_eq!(" all ".parse(), Ok(Selector::All));
        for (text, index) in [("1", 1), (" 1 ", 1), ("01", 1), ("1,", 1), (",1", 1)] {
            let Ok(Selector::List(items)) = text.parse() else {
                panic!("{text} is a list")
            };
            assert!(matches!(items.as_slice(), [SelectorItem::Index(found, _)] if *found == index));
        }
        for text in ["", " ", ","] {
            assert_eq!(text.parse::<Selector>(), Err(SelectorError::Empty));
        }
        for text in ["ALL", "-1", "+1", "1.0", "0x1", "\u{b2}", "\u{661}"] {
            assert!(
                matches!(
                    text.parse::<Selector>(),
                    Err(SelectorError::Uuid(UuidError::Malformed(_)))
                ),
                "{text}"
            );
        }
    }
}
