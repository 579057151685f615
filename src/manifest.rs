//! A training run's JSON manifest, into which one key is merged and nothing else is changed, not even a blank.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::Error;
use crate::host::Host;
use crate::ui;

/// The members of a JSON object in their order, values as they stand in the file.
struct Members(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = Members;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }

        deserializer.deserialize_map(Collect)
    }
}

/// `text` with `key` set to `value`: in its old place, or at the end.
fn merged(text: &str, key: &str, value: &Value) -> Result<String, String> {
    let Members(members) = serde_json::from_str(text).map_err(|error| error.to_string())?;
    // Indented as a member of the object.
    let ours = ui::json_text(value).trim_end().replace('\n', "\n  ");
    let mut lines: Vec<String> = Vec::new();
    let mut placed = false;
    for (name, raw) in &members {
        let quoted = Value::String(name.clone()).to_string();
        if name == key {
            placed = true;
            lines.push(format!("  {quoted}: {ours}"));
        } else {
            lines.push(format!("  {quoted}: {}", raw.get()));
        }
    }
    if !placed {
        lines.push(format!("  {}: {ours}", Value::String(key.to_owned())));
    }
    Ok(format!("{{\n{}\n}}\n", lines.join(",\n")))
}

/// Sets `key` in the manifest at `path`, which is replaced in one step and keeps its mode.
pub fn merge(host: &Host, path: &Path, key: &str, value: &Value) -> Result<(), Error> {
    let failed = |doing: &'static str| {
        let path = path.to_owned();
        move |source: io::Error| Error::File {
            doing,
            path,
            source,
        }
    };
    // A link stays a link: what it points to is replaced.
    let target = fs::canonicalize(host.root.at(path)).map_err(failed("read the manifest"))?;
    let text = fs::read_to_string(&target).map_err(failed("read the manifest"))?;
    let new = merged(&text, key, value).map_err(|reason| Error::BadManifest {
        path: path.to_owned(),
        reason,
    })?;
    replace(&target, &new).map_err(failed("write the manifest"))
}

fn replace(target: &Path, text: &str) -> io::Result<()> {
    let directory = target.parent().unwrap_or(target);
    let mut aside = tempfile::NamedTempFile::new_in(directory)?;
    aside.write_all(text.as_bytes())?;
    aside
        .as_file()
        .set_permissions(fs::metadata(target)?.permissions())?;
    aside.as_file().sync_all()?;
    aside.persist(target)?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_other_key_keeps_its_place_and_its_spelling() {
        let text =
            "{\"z\": 1.50, \"cuda_process_sharing\": null,\n \"a\": {\"y\": [1,  2], \"x\": 1e5}}";
        assert_eq!(
            merged(text, "cuda_process_sharing", &json!({"rank": 0})).unwrap(),
            "{\n  \"z\": 1.50,\n  \"cuda_process_sharing\": {\n    \"rank\": 0\n  },\n  \"a\": {\"y\": [1,  2], \"x\": 1e5}\n}\n"
        );
    }

    #[test]
    fn a_new_key_goes_to_the_end() {
        assert_eq!(merged("{}", "k", &json!(1)).unwrap(), "{\n  \"k\": 1\n}\n");
        assert_eq!(
            merged("{\"b\":2}", "k", &json!(1)).unwrap(),
            "{\n  \"b\": 2,\n  \"k\": 1\n}\n"
        );
    }

    #[test]
    fn what_is_not_an_object_is_refused() {
        for text in ["", "[]", "1", "{", "null"] {
            assert!(merged(text, "k", &json!(1)).is_err(), "{text}");
        }
    }
}
