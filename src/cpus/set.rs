//! A set of CPUs, in the list form that the kernel reads and writes.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A set of CPU numbers, as many as the machine has.
///
/// `FromStr` takes the kernel's list form, `0-3,8,10-11`, as sysfs, `taskset -c` and `Cpus_allowed_list` write it, and
/// nothing else: a stride such as `0-10:2` is refused. `Display` writes the same form.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuSet(BTreeSet<usize>);

/// Why a text is not a list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuSetError {
    /// A part of the list is neither a number nor a range.
    #[error("{0:?} is not a CPU number or a range such as 0-3")]
    Malformed(String),
    /// A number that no machine has.
    #[error("{0:?} is beyond the highest CPU number that is understood, 65535")]
    TooLarge(String),
}

/// Linux is built for at most 8192 CPUs so far. A range of a garbled list must not fill the memory.
const HIGHEST: usize = 65535;

impl CpuSet {
    /// How many CPUs there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this CPU is in the set.
    pub fn contains(&self, cpu: usize) -> bool {
        self.0.contains(&cpu)
    }

    /// The lowest CPU.
    pub fn first(&self) -> Option<usize> {
        self.0.first().copied()
    }

    /// The CPUs, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().copied()
    }

    /// The CPUs of either set.
    pub fn union(&self, other: &Self) -> Self {
        Self(&self.0 | &other.0)
    }

    /// The CPUs of both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// The CPUs of this set that the other one lacks.
    pub fn difference(&self, other: &Self) -> Self {
        Self(&self.0 - &other.0)
    }

    /// Whether no CPU is in both sets.
    pub fn is_disjoint(&self, other: &Self) -> bool {
        self.0.is_disjoint(&other.0)
    }

    /// Whether the other set has every CPU of this one.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }

    /// The CPUs of all these sets.
    pub fn all<'s>(sets: impl IntoIterator<Item = &'s Self>) -> Self {
        sets.into_iter().flat_map(Self::iter).collect()
    }
}

impl FromIterator<usize> for CpuSet {
    fn from_iter<T: IntoIterator<Item = usize>>(cpus: T) -> Self {
        Self(cpus.into_iter().collect())
    }
}

fn number(text: &str, part: &str) -> Result<usize, CpuSetError> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(CpuSetError::Malformed(part.to_owned()));
    }
    // What does not even fit a usize is too large as well.
    text.parse()
        .ok()
        .filter(|cpu| *cpu <= HIGHEST)
        .ok_or_else(|| CpuSetError::TooLarge(part.to_owned()))
}

impl FromStr for CpuSet {
    type Err = CpuSetError;

    /// Empty parts mean nothing, an open range `3-` means its first CPU, and a reversed one no CPU.
    fn from_str(text: &str) -> Result<Self, CpuSetError> {
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = match part.split_once('-') {
                Some((first, last)) if !last.is_empty() => (first, last),
                Some((only, _)) => (only, only),
                None => (part, part),
            };
            cpus.extend(number(first, part)?..=number(last, part)?);
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_no_machine_has_is_refused() {
        for text in [
            "0-99999999999",
            "65536",
            "0-65536",
            "99999999999999999999999-1",
        ] {
            assert_eq!(
                text.parse::<CpuSet>(),
                Err(CpuSetError::TooLarge(text.to_owned())),
            );
        }
        assert_eq!("0-65535".parse::<CpuSet>().map(|set| set.len()), Ok(65536));
    }

    #[test]
    fn sets_are_compared_and_combined() {
        let set = |text: &str| text.parse::<CpuSet>().unwrap();
        let (low, high) = (set("0-3"), set("2-5"));
        assert_eq!(low.union(&high), set("0-5"));
        assert_eq!(low.intersection(&high), set("2-3"));
        assert_eq!(low.difference(&high), set("0-1"));
        assert!(set("2-3").is_subset(&low) && set("0-1").is_disjoint(&high));
        assert_eq!(CpuSet::all([&low, &high]).first(), Some(0));
        assert_eq!(CpuSet::default().first(), None);
    }
}
