//! Which GPU takes the place of which in a restore.

use std::fmt;
use std::str::FromStr;

use crate::gpu::{Gpu, GpuUuid, parse_index};

/// The UUID of a whole GPU, all 16 bytes of it. In every spelling: with and without `GPU-`, with and without dashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WholeUuid([u8; 16]);

/// Why a text names no GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// It is a part of a GPU.
    #[error("{0:?} is a MIG instance, and those cannot be restored elsewhere")]
    Mig(String),
    /// The digits of a UUID are too few or too many.
    #[error("{text:?} has {digits} hexadecimal digits; a GPU's UUID has 32")]
    Length {
        /// As typed.
        text: String,
        /// How many.
        digits: usize,
    },
    /// It has another form.
    #[error("{0:?} is neither nvidia-smi's index of a GPU nor a UUID")]
    Malformed(String),
    /// There is no `=`.
    #[error("{0:?} is not of the form OLD=NEW")]
    NoPair(String),
}

impl WholeUuid {
    /// The bytes as `CUuuid` has them.
    pub fn bytes(self) -> [u8; 16] {
        self.0
    }
}

impl FromStr for WholeUuid {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let text = text.trim();
        let begins_with = |prefix: &str| {
            let head = text.get(..prefix.len());
            head.is_some_and(|head| head.eq_ignore_ascii_case(prefix))
        };
        if begins_with("MIG-") {
            return Err(NameError::Mig(text.to_owned()));
        }
        let rest = if begins_with("GPU-") {
            &text[4..]
        } else {
            text
        };
        let digits = rest.replace('-', "");
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(NameError::Malformed(text.to_owned()));
        }
        match u128::from_str_radix(&digits, 16) {
            Ok(number) if digits.len() == 32 => Ok(Self(number.to_be_bytes())),
            _ => Err(NameError::Length {
                text: text.to_owned(),
                digits: digits.len(),
            }),
        }
    }
}

impl fmt::Display for WholeUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// A GPU as it is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuName {
    /// nvidia-smi's index.
    Index(u32),
    /// Its UUID.
    Uuid(WholeUuid),
}

impl FromStr for GpuName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let text = text.trim();
        // 32 digits are a UUID, whichever they are.
        match parse_index(text).filter(|_| text.len() < 10) {
            Some(index) => Ok(Self::Index(index)),
            None => text.parse().map(Self::Uuid),
        }
    }
}

impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Uuid(uuid) => write!(f, "{uuid}"),
        }
    }
}

/// `OLD=NEW` as it is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedPair {
    old: GpuName,
    new: GpuName,
}

impl NamedPair {
    /// From the GPU that a process was on to another one.
    pub fn of(old: &GpuUuid, new: GpuName) -> Option<Self> {
        let old = GpuName::Uuid(whole(old)?);
        Some(Self { old, new })
    }
}

impl FromStr for NamedPair {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (old, new) = pair(text)?;
        Ok(Self { old, new })
    }
}

/// The two sides of `OLD=NEW`.
fn pair<T: FromStr<Err = NameError>>(text: &str) -> Result<(T, T), NameError> {
    let no_pair = || NameError::NoPair(text.to_owned());
    let (old, new) = text.split_once('=').ok_or_else(no_pair)?;
    Ok((old.parse()?, new.parse()?))
}

/// `CUcheckpointGpuPair`: what was on `old` comes back on `new`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuPair {
    /// The GPU that was left.
    pub old: WholeUuid,
    /// The one that takes its place.
    pub new: WholeUuid,
}

impl FromStr for GpuPair {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (old, new) = pair(text)?;
        Ok(Self { old, new })
    }
}

impl fmt::Display for GpuPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.old, self.new)
    }
}

/// Every GPU of the machine and what takes its place; at least one is not its own. The driver wants all of them named, used
/// or not, and takes a longer way where a map is given (ai-dynamo/snapshot), so that one which changes nothing is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuMap(Vec<GpuPair>);

/// Why pairs make no map.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// The machine has no such GPU.
    #[error("this machine has no GPU {0}")]
    NoSuchGpu(String),
    /// Two pairs begin with one GPU.
    #[error("GPU {0} is to be replaced by two")]
    OldTwice(WholeUuid),
    /// Two pairs end with one GPU.
    #[error("GPU {0} is to replace two")]
    NewTwice(WholeUuid),
    /// A GPU cannot be named, and all must be.
    #[error(
        "a GPU of this machine has no readable UUID, and a restore elsewhere must name every GPU"
    )]
    Unnamed,
}

impl GpuMap {
    /// A map from pairs that were received as a whole; nothing if there are none.
    pub fn of(pairs: Vec<GpuPair>) -> Option<Self> {
        (!pairs.is_empty()).then_some(Self(pairs))
    }

    /// Completes pairs to a map of all GPUs, in nvidia-smi's order: a GPU that nothing is said of keeps its place, unless
    /// another one takes it; then it goes where that one came from. Nothing if every GPU keeps its place.
    pub fn complete(pairs: &[NamedPair], gpus: &[Gpu]) -> Result<Option<Self>, MapError> {
        let named = |gpu: &Gpu| {
            let identity = gpu.identity()?;
            Some((identity.index, whole(&identity.uuid)?))
        };
        let all: Option<Vec<(u32, WholeUuid)>> = gpus.iter().map(named).collect();
        let find = |name: &GpuName| {
            let known = gpus.iter().filter_map(named);
            let mut found = known.filter(|(index, uuid)| match name {
                GpuName::Index(wanted) => index == wanted,
                GpuName::Uuid(wanted) => uuid == wanted,
            });
            found
                .next()
                .map(|(_, uuid)| uuid)
                .ok_or_else(|| MapError::NoSuchGpu(name.to_string()))
        };
        let mut given: Vec<GpuPair> = Vec::new();
        for pair in pairs {
            let pair = GpuPair {
                old: find(&pair.old)?,
                new: find(&pair.new)?,
            };
            if given.contains(&pair) {
                continue;
            }
            if given.iter().any(|other| other.old == pair.old) {
                return Err(MapError::OldTwice(pair.old));
            }
            if given.iter().any(|other| other.new == pair.new) {
                return Err(MapError::NewTwice(pair.new));
            }
            given.push(pair);
        }
        if given.iter().all(|pair| pair.old == pair.new) {
            return Ok(None);
        }
        let goes_to = |gpu: WholeUuid| {
            given
                .iter()
                .find(|pair| pair.old == gpu)
                .map(|pair| pair.new)
        };
        let comes_from = |gpu: WholeUuid| {
            given
                .iter()
                .find(|pair| pair.new == gpu)
                .map(|pair| pair.old)
        };
        let place = |(_, gpu): (u32, WholeUuid)| {
            // What displaces this one, and so on, to the GPU that nothing comes to: its place is free.
            let free = || {
                let mut place = gpu;
                while let Some(from) = comes_from(place) {
                    place = from;
                }
                place
            };
            GpuPair {
                old: gpu,
                new: goes_to(gpu).unwrap_or_else(free),
            }
        };
        let all = all.ok_or(MapError::Unnamed)?;
        Ok(Some(Self(all.into_iter().map(place).collect())))
    }

    /// The pairs, one for each GPU.
    pub fn pairs(&self) -> &[GpuPair] {
        &self.0
    }

    /// The way back.
    pub fn inverse(&self) -> Self {
        let turned = |pair: &GpuPair| GpuPair {
            old: pair.new,
            new: pair.old,
        };
        Self(self.0.iter().map(turned).collect())
    }

    /// The GPU that takes this one's place.
    pub fn place_of(&self, gpu: &GpuUuid) -> GpuUuid {
        let pair = whole(gpu).and_then(|gpu| self.0.iter().find(|pair| pair.old == gpu));
        let new = pair.and_then(|pair| pair.new.to_string().parse().ok());
        new.unwrap_or_else(|| gpu.clone())
    }
}

fn whole(gpu: &GpuUuid) -> Option<WholeUuid> {
    gpu.as_str().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{ComputeMode, GpuIdentity};

    const DIGITS: &str = "0a1b2c3d0e4f5a6b7c8d9e0f1a2b3c40";

    fn gpu(index: u32) -> Gpu {
        let uuid = format!("GPU-{index}a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c4{index}");
        Gpu::Usable {
            identity: GpuIdentity {
                index,
                uuid: uuid.parse().unwrap(),
            },
            compute_mode: ComputeMode::Default,
            mig: None,
        }
    }

    /// The map of four GPUs, as the index that takes the place of each.
    fn map(pairs: &[&str]) -> Result<Option<Vec<usize>>, MapError> {
        let gpus: Vec<Gpu> = (0..4).map(gpu).collect();
        let pairs: Vec<NamedPair> = pairs.iter().map(|pair| pair.parse().unwrap()).collect();
        let index = |uuid: WholeUuid| {
            let is_it = |gpu: &Gpu| gpu.identity().unwrap().uuid.as_str() == uuid.to_string();
            gpus.iter().position(is_it).unwrap()
        };
        let map = GpuMap::complete(&pairs, &gpus)?;
        Ok(map.map(|map| {
            let olds = map.pairs().iter().map(|pair| index(pair.old));
            assert!(olds.eq(0..4));
            map.pairs().iter().map(|pair| index(pair.new)).collect()
        }))
    }

    #[test]
    fn a_uuid_is_taken_in_every_spelling_and_in_no_other_length() {
        let canonical = "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40";
        let dashed = &canonical[4..];
        for text in [
            canonical,
            dashed,
            DIGITS,
            &DIGITS.to_uppercase(),
            &format!(" gpu-{DIGITS}\n"),
        ] {
            let uuid: WholeUuid = text.parse().unwrap();
            assert_eq!(uuid.to_string(), canonical);
        }
        for (text, digits) in [
            (&DIGITS[1..], 31),
            (&format!("{DIGITS}0"), 33),
            ("GPU-0a1b", 4),
        ] {
            let refused = text.parse::<WholeUuid>();
            assert_eq!(
                refused,
                Err(NameError::Length {
                    text: text.to_owned(),
                    digits
                })
            );
        }
        for text in ["", "GPU-", "GPU-xyz", "all", "é"] {
            assert!(
                matches!(text.parse::<WholeUuid>(), Err(NameError::Malformed(_))),
                "{text}"
            );
        }
        assert!(matches!(
            "MIG-0a1b".parse::<WholeUuid>(),
            Err(NameError::Mig(_))
        ));
    }

    #[test]
    fn thirty_two_decimal_digits_are_a_uuid_and_few_are_an_index() {
        let digits = "00000000000000000000000000000001";
        assert!(matches!(digits.parse(), Ok(GpuName::Uuid(_))));
        assert_eq!("1".parse(), Ok(GpuName::Index(1)));
        assert!("12345678901".parse::<GpuName>().is_err());
        assert_eq!(
            "0".parse::<NamedPair>(),
            Err(NameError::NoPair("0".to_owned()))
        );
    }

    #[test]
    fn a_map_is_completed_to_every_gpu() {
        assert_eq!(map(&["0=1"]), Ok(Some(vec![1, 0, 2, 3])));
        assert_eq!(map(&["0=1", "1=0"]), Ok(Some(vec![1, 0, 2, 3])));
        assert_eq!(map(&["0=1", "1=2"]), Ok(Some(vec![1, 2, 0, 3])));
        assert_eq!(map(&["0=1", "2=3"]), Ok(Some(vec![1, 0, 3, 2])));
        assert_eq!(map(&["0=1", "0=1"]), Ok(Some(vec![1, 0, 2, 3])));
        assert_eq!(map(&["0=0", "3=2"]), Ok(Some(vec![0, 1, 3, 2])));
    }

    #[test]
    fn a_map_that_changes_nothing_is_none() {
        assert_eq!(map(&[]), Ok(None));
        assert_eq!(map(&["0=0", "2=2"]), Ok(None));
    }

    #[test]
    fn what_is_no_map_is_refused() {
        assert!(matches!(map(&["0=1", "0=2"]), Err(MapError::OldTwice(_))));
        assert!(matches!(map(&["0=1", "2=1"]), Err(MapError::NewTwice(_))));
        assert_eq!(map(&["0=4"]), Err(MapError::NoSuchGpu("4".to_owned())));
        let lost = Gpu::Unusable {
            index: Some(2),
            diagnostic: "[GPU is lost]".to_owned(),
        };
        let pairs = ["0=1".parse().unwrap()];
        assert_eq!(
            GpuMap::complete(&pairs, &[gpu(0), gpu(1), lost]),
            Err(MapError::Unnamed)
        );
    }

    #[test]
    fn the_inverse_leads_back() {
        let gpus: Vec<Gpu> = (0..4).map(gpu).collect();
        let pairs = ["0=1".parse().unwrap(), "1=3".parse().unwrap()];
        let map = GpuMap::complete(&pairs, &gpus).unwrap().unwrap();
        for gpu in gpus.iter().filter_map(Gpu::identity) {
            assert_eq!(map.inverse().place_of(&map.place_of(&gpu.uuid)), gpu.uuid);
        }
    }
}
