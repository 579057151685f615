//! What is read from nvidia-smi, from the command line and from `CUDA_VISIBLE_DEVICES`: any text has a meaning or a
//! refusal, and the meaning does not depend on what stands beside it.

use proptest::prelude::any;
use proptest::{prop_assert, prop_assert_eq, prop_assert_ne};
use uni_cumps::error::{Error, Selection};
use uni_cumps::gpu::{Device, Gpu, GpuIdentity, GpuUuid, Selector, SelectorItem};
use uni_cumps::nvidia_smi;
use uni_cumps::record::{DaemonName, NameError};
use uni_cumps::topology;
use uni_cumps::ui;

use crate::invented::{gpus, machine, mask, nvidia_smi_output, selector, text, uuid, word};
use crate::{MANY, law};

fn identities(gpus: &[Gpu]) -> Vec<GpuIdentity> {
    gpus.iter().filter_map(Gpu::identity).cloned().collect()
}

#[test]
fn a_line_of_nvidia_smi_is_a_gpu_or_a_message() {
    law(MANY, nvidia_smi_output(), |output| {
        let (gpus, messages) = nvidia_smi::rows(&output);
        let lines = output.lines().filter(|line| !line.trim().is_empty());
        prop_assert_eq!(gpus.len() + messages.len(), lines.count());
        for gpu in identities(&gpus) {
            prop_assert_eq!(gpu.uuid.as_str().parse(), Ok(gpu.uuid));
        }
        Ok(())
    });
}

#[test]
fn a_line_of_nvidia_smi_means_the_same_beside_any_other() {
    let outputs = (nvidia_smi_output(), nvidia_smi_output());
    law(MANY, outputs, |(first, second)| {
        let (mut gpus, mut messages) = nvidia_smi::rows(&first);
        let (more_gpus, more_messages) = nvidia_smi::rows(&second);
        gpus.extend(more_gpus);
        messages.extend(more_messages);
        let both = nvidia_smi::rows(&format!("{first}\n{second}"));
        prop_assert_eq!(both, (gpus, messages));
        Ok(())
    });
}

#[test]
fn a_uuid_that_was_read_is_read_as_itself() {
    let texts = proptest::prop_oneof![
        text(),
        selector(),
        "(GPU-|gpu-|MIG-)?[0-9a-fA-Fg-z-]{0,40}",
        "[0-9a-fé-]{36}",
    ];
    law(MANY, texts, |text| {
        let Ok(uuid) = text.parse::<GpuUuid>() else {
            return Ok(());
        };
        let stored = uuid.as_str();
        prop_assert!(stored.starts_with("GPU-") && !uuid.bare().is_empty());
        prop_assert!(
            stored
                .bytes()
                .all(|byte| byte == b'-' || byte.is_ascii_alphanumeric())
        );
        prop_assert_eq!(&stored.parse::<GpuUuid>(), &Ok(uuid.clone()));
        prop_assert_eq!(stored.to_ascii_uppercase().parse(), Ok(uuid.clone()));
        prop_assert_eq!(
            stored.replace('-', "").replace("GPU", "GPU-").parse(),
            Ok(uuid)
        );
        Ok(())
    });
}

#[test]
fn every_spelling_of_32_digits_is_one_gpu() {
    let spellings = (
        "[0-9a-f]{32}",
        "[ \t\n]{0,2}",
        any::<[bool; 3]>(),
        any::<u64>(),
    );
    law(
        MANY,
        spellings,
        |(digits, blanks, [dashes, prefix, low], upper)| {
            let mut spelling: String = digits
                .chars()
                .enumerate()
                .flat_map(|(place, digit)| {
                    let dash = (dashes || !prefix) && [8, 12, 16, 20].contains(&place);
                    let digit = match upper >> place & 1 {
                        1 => digit.to_ascii_uppercase(),
                        _ => digit,
                    };
                    [dash.then_some('-'), Some(digit)]
                })
                .flatten()
                .collect();
            if prefix {
                spelling.insert_str(0, if low { "gpu-" } else { "GPU-" });
            }
            let (a, b, c) = (&digits[..8], &digits[8..12], &digits[12..16]);
            let (d, e) = (&digits[16..20], &digits[20..]);
            let uuid: GpuUuid = format!("{blanks}{spelling}{blanks}").parse().unwrap();
            prop_assert_eq!(uuid.as_str(), format!("GPU-{a}-{b}-{c}-{d}-{e}"));
            let name = name_for(&uuid).unwrap();
            prop_assert_eq!(name.as_str(), format!("gpu-{a}-{b}-{c}-{d}-{e}"));
            Ok(())
        },
    );
}

/// The name of a daemon for this GPU alone.
fn name_for(uuid: &GpuUuid) -> Result<DaemonName, NameError> {
    let uuid = uuid.clone();
    DaemonName::for_devices(&[Device::Gpu(GpuIdentity { index: 0, uuid })])
}

#[test]
fn the_beginning_of_a_uuid_abbreviates_it() {
    law(
        MANY,
        (uuid(), 0..80_usize, text()),
        |(uuid, length, other)| {
            let beginning = &uuid.as_str()[..length.min(uuid.as_str().len())];
            let says_a_digit = beginning.len() > "GPU-".len();
            prop_assert_eq!(uuid.is_abbreviated_by(beginning), says_a_digit);
            if uuid.is_abbreviated_by(&other) {
                let start = other.trim().replace('-', "").to_ascii_lowercase();
                let whole = uuid.as_str().replace('-', "").to_ascii_lowercase();
                prop_assert!(whole.starts_with(&start));
            }
            // A UUID of any length gives a name or a refusal.
            let _ = name_for(&uuid);
            Ok(())
        },
    );
}

#[test]
fn a_selector_is_its_entries_whatever_stands_between_them() {
    law(MANY, selector(), |text| {
        match text.parse() {
            Ok(Selector::All) => prop_assert_eq!(text.trim(), "all"),
            Ok(Selector::List(items)) => {
                prop_assert!(!items.is_empty());
                let entries: Vec<&str> = items.iter().map(SelectorItem::text).collect();
                let again = format!(" ,{}, ", entries.join(" ,, "));
                prop_assert_eq!(again.parse(), Ok(Selector::List(items)));
            }
            Err(error) => {
                let error = Error::from(Selection::from(error));
                prop_assert_eq!(error.code(), "bad-selector");
            }
        }
        Ok(())
    });
}

#[test]
fn a_daemon_name_is_safe_as_a_directory_and_anything_else_is_refused() {
    let names = proptest::prop_oneof![
        "[a-z0-9-]{0,66}",
        word(&[
            "a", "A", ".", "..", "a/b", "/", ".stale", "a ", "-a", "a\n", "é"
        ]),
    ];
    law(MANY, names, |text| {
        let plain = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
        let expected = text.len() <= 64
            && text.starts_with(plain)
            && text.chars().all(|letter| plain(letter) || letter == '-');
        let name = text.parse::<DaemonName>();
        prop_assert_eq!(name.is_ok(), expected);
        prop_assert!(name.is_err() || name.unwrap().as_str() == text);
        Ok(())
    });
}

#[test]
fn a_mask_shows_some_of_the_gpus_each_once() {
    law(MANY, (gpus(), mask()), |(gpus, mask)| {
        let shown = topology::visible(&gpus, Some(&mask)).gpus;
        if mask.trim() == "all" {
            prop_assert_eq!(&shown, &gpus);
            return Ok(());
        }
        for (place, gpu) in shown.iter().enumerate() {
            prop_assert!(gpus.contains(gpu));
            prop_assert!(!shown[..place].contains(gpu));
        }
        prop_assert_eq!(topology::visible(&gpus, None).gpus, gpus);
        Ok(())
    });
}

#[test]
fn a_mask_means_the_same_in_whichever_order_the_gpus_are_listed() {
    law(MANY, (machine(), mask()), |(mut gpus, mask)| {
        let shown = topology::visible(&gpus, Some(&mask));
        gpus.reverse();
        if mask.trim() != "all" {
            prop_assert_eq!(topology::visible(&gpus, Some(&mask)), shown);
        }
        Ok(())
    });
}

#[test]
fn a_longer_mask_shows_no_less_and_nothing_more_once_the_list_has_ended() {
    law(MANY, (gpus(), mask(), mask()), |(gpus, first, second)| {
        let longer_mask = format!("{first},{second}");
        // The word alone means everything.
        if first.trim() == "all" || longer_mask.trim() == "all" {
            return Ok(());
        }
        let shorter = topology::visible(&gpus, Some(&first));
        let longer = topology::visible(&gpus, Some(&longer_mask));
        prop_assert!(longer.gpus.starts_with(&shorter.gpus));
        let has_ended = shorter
            .notes
            .iter()
            .any(|note| note.starts_with("the list ends"));
        if has_ended {
            prop_assert_eq!(longer, shorter);
        }
        Ok(())
    });
}

/// Everything that can be said of a failure.
fn told(error: &Selection) -> String {
    format!("{error:?} {}", ui::error_json(&error.clone().into()))
}

#[test]
fn a_selector_means_one_usable_gpu_under_every_mask_or_is_refused() {
    law(
        MANY,
        (gpus(), selector(), mask()),
        |(gpus, selector, mask)| {
            let plan = topology::resolve(Some(&selector), &gpus, None);
            let masked = topology::resolve(Some(&selector), &gpus, Some(&mask));
            match (plan, masked) {
                (Ok(plan), Ok(masked)) => {
                    let gpu = plan.devices[0].gpu().clone();
                    prop_assert!(identities(&gpus).contains(&gpu));
                    let meant = match plan.selector.parse::<u32>() {
                        Ok(index) => gpu.index == index,
                        Err(_) => plan.selector.parse() == Ok(gpu.uuid.clone()),
                    };
                    prop_assert!(meant, "{} means {gpu}", plan.selector);
                    prop_assert_eq!(plan, masked);
                }
                (Err(error), Err(masked)) => prop_assert_eq!(told(&error), told(&masked)),
                (plan, masked) => prop_assert!(false, "{plan:?} and masked {masked:?}"),
            }
            Ok(())
        },
    );
}

#[test]
fn without_a_selector_the_one_visible_gpu_is_meant_or_none() {
    let masks = proptest::option::of(mask());
    law(MANY, (gpus(), masks), |(gpus, mask)| {
        let visible = topology::visible(&gpus, mask.as_deref());
        let plan = topology::resolve(None, &gpus, mask.as_deref());
        match (identities(&visible.gpus).as_slice(), plan) {
            ([only], Ok(plan)) => prop_assert_eq!(only, plan.devices[0].gpu()),
            ([_], Err(error)) => prop_assert!(false, "{}", told(&error)),
            (_, Ok(plan)) => prop_assert!(false, "{plan:?}"),
            (_, Err(error)) => prop_assert_ne!(told(&error), ""),
        }
        Ok(())
    });
}
