//! A record file: it is refused, or it is a record that can be acted on and comes back as it was.
//! Begin with real ones: `cargo +nightly fuzz run record fuzz/corpus/record tests/records`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use uni_cumps::record::DaemonRecord;
use uni_cumps::ui::json_text;

fuzz_target!(|content: &[u8]| {
    let Ok(name) = "a".parse() else { return };
    let Ok(record) = DaemonRecord::from_json(name, content) else {
        return;
    };
    assert!(record.process.pid > 0 && !record.gpu_uuids.is_empty());
    for (_, value) in record.client_environment() {
        assert!(!value.contains('\0'));
    }
    let text = json_text(&record.to_json());
    assert!(text.is_ascii());
    let read = DaemonRecord::from_json(record.name.clone(), text.as_bytes());
    assert_eq!(read, Ok(record));
});
