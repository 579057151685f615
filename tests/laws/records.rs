//! Record files: whatever is in one is refused or understood, and what was understood is written as it was.

use proptest::{prop_assert, prop_assert_eq, prop_oneof};
use uni_cumps::record::DaemonRecord;
use uni_cumps::ui::json_text;

use crate::invented::{bytes, damaged, name, record, tampered_record};
use crate::{MANY, law};

#[test]
fn a_record_comes_back_from_its_file_with_every_field() {
    law(MANY, record(), |record| {
        let value = record.to_json();
        for (key, kept) in &record.unknown {
            prop_assert_eq!(&value[key], kept);
        }
        for text in [json_text(&value), value.to_string()] {
            let read = DaemonRecord::from_json(record.name.clone(), text.as_bytes());
            prop_assert_eq!(read.as_ref(), Ok(&record));
        }
        Ok(())
    });
}

#[test]
fn a_file_is_a_record_that_can_be_acted_on_or_it_is_refused() {
    let content = prop_oneof![
        1 => bytes(),
        4 => damaged(tampered_record()),
    ];
    law(MANY, (name(), content), |(name, content)| {
        let Ok(record) = DaemonRecord::from_json(name.clone(), &content) else {
            return Ok(());
        };
        prop_assert_eq!(&record.name, &name);
        prop_assert!(record.process.pid > 0);
        prop_assert!(!record.gpu_uuids.is_empty());
        prop_assert!(record.pipe_directory.is_absolute() && record.log_directory.is_absolute());
        for (_, value) in record.client_environment() {
            prop_assert!(!value.contains('\0'));
        }
        let written = json_text(&record.to_json());
        prop_assert_eq!(
            DaemonRecord::from_json(name, written.as_bytes()),
            Ok(record)
        );
        Ok(())
    });
}
