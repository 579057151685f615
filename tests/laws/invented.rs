//! Made-up inputs. Noise alone is refused at the first letter, so most of them are words that the parsers know, in an
//! order that they do not expect.

use std::collections::BTreeMap;
use std::path::PathBuf;

use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::{Just, any};
use proptest::prop_oneof;
use proptest::sample::select;
use proptest::strategy::Strategy;
use serde_json::{Map, Number, Value};
use uni_cumps::gpu::{ComputeMode, Gpu, GpuIdentity, GpuUuid, MigUuid};
use uni_cumps::limits::{DaemonLimits, Priority};
use uni_cumps::record::{DaemonName, DaemonRecord, Place, ProcessId, TopologyMode};

/// Letters that a parser, a shell or a terminal takes notice of.
const NOTICED: &str = "'\"\\$`!=~-+,.:;#%&|*?/()[]{}<>^_ \t\r\n0\u{1b}\u{7f}\u{9b}\u{a0}é\u{61c}\u{202e}\u{2028}\u{fffd}\u{1f600}";

/// The letter of a number: mostly plain, often one that is taken notice of, now and then any of Unicode. A strategy for
/// each letter would make up the same, and take most of the time that the laws take.
fn letter(number: u32) -> char {
    let (kind, which) = (number % 16, number / 16);
    let letter = match kind {
        0..8 => char::from_u32(u32::from(b' ') + which % 95),
        8..13 => NOTICED
            .chars()
            .nth(which as usize % NOTICED.chars().count()),
        13 => char::from_u32(which % 0xa0),
        _ => char::from_u32(which % 0x11_0000),
    };
    letter.unwrap_or_default()
}

pub(crate) fn text() -> impl Strategy<Value = String> {
    text_of(16)
}

/// A text of fewer letters than this.
pub(crate) fn text_of(length: usize) -> impl Strategy<Value = String> {
    vec(any::<u32>(), 0..length).prop_map(|numbers| numbers.into_iter().map(letter).collect())
}

/// A text that fits into an environment.
pub(crate) fn text_without_nul() -> impl Strategy<Value = String> {
    text().prop_map(|text| text.replace('\0', ""))
}

/// Bytes that a parser takes notice of.
const BYTES: &[u8] = b"()[]{}\",:= \n\x00\xff019a";

pub(crate) fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..32),
        text().prop_map(String::into_bytes),
        vec(0..BYTES.len(), 0..32).prop_map(|places| places.iter().map(|i| BYTES[*i]).collect()),
    ]
}

/// One of these words, or any text.
pub(crate) fn word(known: &'static [&'static str]) -> impl Strategy<Value = String> {
    prop_oneof![
        5 => select(known).prop_map(str::to_owned),
        1 => text(),
    ]
}

/// These words and others behind each other, with something between them.
pub(crate) fn phrase(
    known: &'static [&'static str],
    between: &'static [&'static str],
) -> impl Strategy<Value = String> {
    vec((word(known), select(between)), 0..6)
        .prop_map(|parts| parts.into_iter().flat_map(|(a, b)| [a, b.into()]).collect())
}

/// UUIDs that begin alike, so that lists and masks often speak of the same GPU.
const UUIDS: &[&str] = &[
    "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
    "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41",
    "GPU-0aff2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
    "GPU-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
];

/// Ways to name a GPU, and words that are nearly one.
pub(crate) const NAMES_OF_GPUS: &[&str] = &[
    "0",
    "1",
    "01",
    "2",
    "7",
    "-1",
    "99999999999",
    "all",
    "",
    "GPU-",
    "GPU-0a",
    "gpu-0A1B",
    "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c4",
    "GPU-1",
    "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
    "GPU-0A1B2C3D-0E4F-5A6B-7C8D-9E0F1A2B3C41",
    "0aff2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
    "GPU-1a1b2c3d0e4f5a6b7c8d9e0f1a2b3c40",
    "MIG-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
    "NoDevFiles",
    "----------------------------------é",
];

pub(crate) fn selector() -> impl Strategy<Value = String> {
    prop_oneof![
        word(NAMES_OF_GPUS),
        phrase(NAMES_OF_GPUS, &[",", ",", " , ", ""]),
    ]
}

pub(crate) fn mask() -> impl Strategy<Value = String> {
    selector()
}

pub(crate) fn uuid() -> impl Strategy<Value = GpuUuid> {
    prop_oneof![
        8 => select(UUIDS).prop_map(str::to_owned),
        1 => "GPU-[0-9a-f]{32}",
        1 => "GPU-[0-9a-z]{1,70}",
    ]
    .prop_map(|text| text.parse().unwrap())
}

fn gpu() -> impl Strategy<Value = Gpu> {
    let index = || prop_oneof![4 => 0..4_u32, 1 => any::<u32>()];
    prop_oneof![
        4 => (index(), uuid(), word(MODES)).prop_map(|(index, uuid, mode)| Gpu::Usable {
            mig: None,
            identity: GpuIdentity { index, uuid },
            compute_mode: ComputeMode::from(mode.as_str()),
        }),
        1 => (option::of(index()), text()).prop_map(|(index, diagnostic)| Gpu::Unusable {
            index,
            diagnostic,
        }),
    ]
}

/// GPUs as no machine lists them: indices and UUIDs may come twice.
pub(crate) fn gpus() -> impl Strategy<Value = Vec<Gpu>> {
    vec(gpu(), 0..5)
}

/// GPUs as a machine lists them: no index and no UUID comes twice.
pub(crate) fn machine() -> impl Strategy<Value = Vec<Gpu>> {
    gpus().prop_map(|gpus| {
        let mut different: Vec<Gpu> = Vec::new();
        for gpu in gpus {
            let uuid = gpu.identity().map(|gpu| &gpu.uuid);
            let is_like = |other: &Gpu| {
                other.index() == gpu.index()
                    || (uuid.is_some() && uuid == other.identity().map(|gpu| &gpu.uuid))
            };
            if !different.iter().any(is_like) {
                different.push(gpu);
            }
        }
        different
    })
}

const MODES: &[&str] = &[
    "Default",
    "Exclusive_Process",
    "Exclusive_Thread",
    "Prohibited",
    "[N/A]",
    "[Not Supported]",
];

const CELLS: &[&str] = &[
    "0",
    "1",
    "007",
    "99999999999",
    "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
    "GPU-0A1B2C3D-0E4F-5A6B-7C8D-9E0F1A2B3C41",
    "0aff2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
    "MIG-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40",
    "Default",
    "Exclusive_Process",
    "[N/A]",
    "[GPU is lost]",
    "[",
    "]",
    "ERR!",
    "N/A",
    "",
    "No devices were found",
    "Unable to determine the device handle for GPU0000:81:00.0: Unknown Error",
];

/// What nvidia-smi might print.
pub(crate) fn nvidia_smi_output() -> impl Strategy<Value = String> {
    let whole_row =
        || (word(CELLS), word(CELLS), word(CELLS)).prop_map(|(a, b, c)| format!("{a}, {b}, {c}\n"));
    prop_oneof![
        3 => vec(whole_row(), 0..5).prop_map(|rows| rows.concat()),
        2 => phrase(CELLS, &[",", ", ", "\n", "\r\n", "\n\n", " "]),
        1 => bytes().prop_map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
    ]
}

/// Any JSON value that a reader of moderate patience accepts.
pub(crate) fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        finite().prop_map(Value::from),
        text().prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..3).prop_map(Value::from),
            btree_map(text(), inner, 0..3).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn finite() -> impl Strategy<Value = f64> {
    prop_oneof![any::<f64>(), 0.0..4e9]
        .prop_filter("JSON has no other numbers", |number| number.is_finite())
}

pub(crate) fn name() -> impl Strategy<Value = DaemonName> {
    "[a-z0-9][a-z0-9-]{0,9}".prop_map(|text| text.parse().unwrap())
}

/// The fields of a record file.
pub(crate) const FIELDS: &[&str] = &[
    "boot_id",
    "created_at",
    "gpu_uuids",
    "host",
    "log_directory",
    "mig_gpu_uuid",
    "name",
    "pid",
    "pid_namespace",
    "pipe_directory",
    "process_start_ticks",
    "topology_mode",
    "uid",
];

fn path() -> impl Strategy<Value = PathBuf> {
    text_without_nul().prop_map(|text| PathBuf::from(format!("/{text}")))
}

fn unknown_fields() -> impl Strategy<Value = Map<String, Value>> {
    let key = word(&["gpu", "Pid", "uids", "version", "limits", ""]);
    btree_map(key, json(), 0..3).prop_map(|fields| {
        let unknown = |(key, _): &(String, Value)| !FIELDS.contains(&key.as_str());
        fields.into_iter().filter(unknown).collect()
    })
}

pub(crate) fn record() -> impl Strategy<Value = DaemonRecord> {
    let place = (text(), option::of(text()), option::of(any::<u64>())).prop_map(
        |(host, boot_id, pid_namespace)| Place {
            host,
            boot_id,
            pid_namespace,
        },
    );
    let process =
        (1..=i32::MAX, any::<u64>()).prop_map(|(pid, start_ticks)| ProcessId { pid, start_ticks });
    let daemon = (
        name(),
        any::<u32>(),
        select(&TopologyMode::ALL[..]),
        finite(),
    );
    let uuids = vec(uuid(), 1..4);
    (
        daemon,
        place,
        process,
        uuids,
        path(),
        path(),
        unknown_fields(),
    )
        .prop_map(
            |(daemon, place, process, gpu_uuids, pipe_directory, log_directory, mut unknown)| {
                let (name, uid, topology_mode, created_at) = daemon;
                let limits = DaemonLimits {
                    threads: uid.is_multiple_of(5).then(|| "12.5".parse().unwrap()),
                    priority: uid.is_multiple_of(3).then_some(Priority::Low),
                    memory: BTreeMap::new(),
                };
                if !limits.is_empty() {
                    unknown.remove("limits");
                }
                DaemonRecord {
                    name,
                    uid,
                    place,
                    topology_mode,
                    gpu_indices: (0..).zip(&gpu_uuids).map(|(index, _)| index).collect(),
                    // A part of its only GPU.
                    mig_uuid: (gpu_uuids.len() == 1 && uid % 2 == 1).then(mig_uuid),
                    compute_modes_before: gpu_uuids
                        .iter()
                        .filter(|_| uid % 3 == 1)
                        .map(|gpu| (gpu.clone(), "Default".to_owned()))
                        .collect(),
                    gpu_uuids,
                    pipe_directory,
                    log_directory,
                    process,
                    created_at,
                    limits,
                    unknown,
                }
            },
        )
}

fn mig_uuid() -> MigUuid {
    "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f".parse().unwrap()
}

/// The content of a record file in which somebody has replaced some values.
pub(crate) fn tampered_record() -> impl Strategy<Value = Vec<u8>> {
    let value = prop_oneof![
        json(),
        select(
            &[
                "0",
                "-1",
                "1.0",
                "1e999",
                "\"/\"",
                "\"/\\u0000\"",
                "[]",
                "[\"GPU-0\"]",
                "\"GPU-0\"",
                "[\"MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f\"]",
                "null"
            ][..]
        )
        .prop_map(|text| serde_json::from_str(text).unwrap_or(Value::Null)),
        any::<f64>().prop_map(|number| Number::from_f64(number).into()),
    ];
    (record(), vec((word(FIELDS), value), 0..3)).prop_map(|(record, edits)| {
        let mut content = record.to_json();
        for (key, value) in edits {
            content[key] = value;
        }
        content.to_string().into_bytes()
    })
}

/// `content` with a piece cut out, written over, or nothing done to it.
pub(crate) fn damaged(content: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    (content, any::<[usize; 2]>(), option::of(bytes())).prop_map(|(mut content, ends, piece)| {
        let Some(piece) = piece else { return content };
        let [a, b] = ends.map(|end| end % (content.len() + 1));
        content.splice(a.min(b)..a.max(b), piece);
        content
    })
}
