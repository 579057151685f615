//! What the user writes: the first line is a selector, the second a mask, the third a daemon's name.
#![no_main]

use libfuzzer_sys::fuzz_target;
use uni_cumps::gpu::{Gpu, Selector};
use uni_cumps::record::DaemonName;
use uni_cumps::{nvidia_smi, topology, ui};

const MACHINE: &str = "\
0, GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40, Default
1, [GPU is lost], [GPU is lost]
2, GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41, Prohibited
3, GPU-1a, Default
";

fuzz_target!(|input: &str| {
    let mut lines = input.split('\n');
    let [selector, mask, name] = [lines.next(), lines.next(), lines.next()];
    let (gpus, _) = nvidia_smi::rows(MACHINE);

    let shown = topology::visible(&gpus, mask);
    assert!(shown.gpus.iter().all(|gpu| gpus.contains(gpu)));
    for selector in [selector, None] {
        match topology::resolve_all(selector, None, &gpus, mask) {
            Ok(plans) => {
                for device in plans.iter().flat_map(|plan| &plan.devices) {
                    let is_it = |gpu: &Gpu| gpu.identity() == Some(device.gpu());
                    assert!(gpus.iter().any(is_it));
                }
                for plan in &plans {
                    // A UUID of any length gives a name or a refusal.
                    let _ = DaemonName::for_devices(&plan.devices);
                }
            }
            Err(error) => assert!(ui::json_text(&ui::error_json(&error.into())).is_ascii()),
        }
    }
    if let Some(Ok(Selector::List(items))) = selector.map(str::parse) {
        let entries: Vec<&str> = items.iter().map(|item| item.text()).collect();
        assert_eq!(entries.join(",").parse(), Ok(Selector::List(items)));
    }
    assert!(shown.devices.len() <= gpus.len());
    if let Some(Ok(name)) = name.map(str::parse::<DaemonName>) {
        assert!(name.as_str().len() <= 64 && !name.as_str().contains(['/', '.']));
    }
});
