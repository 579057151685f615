//! Making the GPUs of a daemon exclusive, and taking over what an earlier daemon of its name has made so.

use super::{ModesBefore, Wanted};
use crate::compute_mode;
use crate::error::Error;
use crate::gpu::GpuUuid;
use crate::nvidia_smi;
use crate::record::Belongs;
use crate::store::Entry;
use crate::ui::Ui;

impl Wanted<'_> {
    /// The compute modes that are to be changed, as they are now: whoever had the lock before may have changed them.
    pub(super) fn modes_to_change(&self) -> Result<ModesBefore, Error> {
        if !self.exclusive {
            return Ok(ModesBefore::new());
        }
        let discovery = nvidia_smi::discover(self.host)?;
        Ok(compute_mode::to_change(&discovery, &self.plan.devices).0)
    }

    /// What an earlier daemon of this name has made exclusive.
    pub(super) fn old_modes(&self, entry: Option<&Entry>) -> ModesBefore {
        match entry {
            Some(Entry::Record(old) | Entry::Intent(old))
                if old.place.seen_from(&self.here) == Belongs::Here =>
            {
                old.compute_modes_before.clone()
            }
            _ => ModesBefore::new(),
        }
    }

    /// Makes the GPUs exclusive. What an earlier daemon has made so goes over to this one, or gets its mode back.
    pub(super) fn change_modes(
        &self,
        ui: &mut Ui<'_>,
        to_change: &ModesBefore,
        old: &ModesBefore,
    ) -> Result<ModesBefore, Error> {
        let goes_over = |gpu: &GpuUuid| {
            let mut devices = self.plan.devices.iter();
            self.exclusive && devices.any(|device| device.gpu().uuid == *gpu)
        };
        let (inherited, given_back): (ModesBefore, ModesBefore) =
            old.clone().into_iter().partition(|(gpu, _)| goes_over(gpu));
        compute_mode::restore(self.host, ui, &given_back)?;
        let mut changed = compute_mode::make_exclusive(self.host, ui, to_change)?;
        changed.extend(inherited);
        Ok(changed)
    }
}
