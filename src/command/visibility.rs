//! `visibility`: a mask whose indices are replaced by UUIDs, which mean the same GPU inside an MPS server.

use crate::cli::VisibilityArgs;
use crate::error::Error;
use crate::gpu::{Gpu, entries, parse_index};
use crate::host::Host;
use crate::nvidia_smi;
use crate::sharing;
use crate::ui::Ui;

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &VisibilityArgs) -> Result<u8, Error> {
    let list = args.list.clone().or_else(|| host.env.visible_devices());
    let list = list.unwrap_or_default();
    let entries: Vec<&str> = entries(&list).collect();
    let needs_table = entries.iter().any(|entry| parse_index(entry).is_some());
    let gpus = match needs_table {
        true => nvidia_smi::discover(host)?.gpus,
        false => Vec::new(),
    };
    let uuid_of = |index| {
        let mut usable = gpus.iter().filter_map(Gpu::identity);
        usable
            .find(|gpu| gpu.index == index)
            .map(|gpu| gpu.uuid.clone())
    };
    ui.line(sharing::with_uuids(&entries, uuid_of)?.join(","));
    Ok(0)
}
