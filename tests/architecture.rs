//! The newcomer's picture, held by tests: each file imports only from the rows above it, and the map names every file.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The table in `src/lib.rs`, from its first row on: the files of each row.
fn rows() -> Vec<Vec<String>> {
    let map = fs::read_to_string("src/lib.rs").unwrap();
    map.lines()
        .filter_map(|line| line.strip_prefix("//! | "))
        .filter(|line| !line.starts_with("row ") && !line.starts_with("---"))
        .map(|line| {
            let files = line.split('|').nth(1).unwrap();
            files
                .split_whitespace()
                .map(|file| file.trim_matches('`').to_owned())
                .collect()
        })
        .collect()
}

fn sources(directory: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            let module = path.file_name().unwrap().to_str().unwrap().to_owned();
            found.extend(
                sources(&path)
                    .into_iter()
                    .map(|(_, text)| (module.clone(), text)),
            );
        } else {
            let module = path.file_stem().unwrap().to_str().unwrap().to_owned();
            found.push((module, fs::read_to_string(&path).unwrap()));
        }
    }
    found
}

/// The modules of this crate that a source text names.
fn imports(text: &str) -> BTreeSet<String> {
    let product = text.split("#[cfg(test)]").next().unwrap();
    product
        .match_indices("crate::")
        .map(|(at, found)| {
            let rest = &product[at + found.len()..];
            let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
            rest[..end.unwrap_or(rest.len())].to_owned()
        })
        .collect()
}

#[test]
fn each_file_imports_only_from_the_rows_above_it() {
    let level: BTreeMap<String, usize> = rows()
        .into_iter()
        .enumerate()
        .flat_map(|(row, files)| files.into_iter().map(move |file| (file, row)))
        .collect();
    for (module, text) in sources(Path::new("src")) {
        if module == "lib" || module == "main" {
            continue;
        }
        let own = level
            .get(&module)
            .unwrap_or_else(|| panic!("{module} is not on the map of src/lib.rs"));
        for import in imports(&text) {
            let row = level
                .get(&import)
                .unwrap_or_else(|| panic!("{module} imports {import}, which is not on the map"));
            // Within a row, a service may use another; a command never another command.
            assert!(
                row < own || (row == own && module != "command"),
                "{module} imports {import}"
            );
        }
    }
}

#[test]
fn the_map_names_every_file_and_no_other() {
    let named: BTreeSet<String> = rows().into_iter().flatten().collect();
    let there: BTreeSet<String> = sources(Path::new("src"))
        .into_iter()
        .map(|(module, _)| module)
        .filter(|module| module != "lib" && module != "main")
        .collect();
    assert_eq!(named, there);
}

#[test]
fn plans_see_no_host() {
    for (module, text) in sources(Path::new("src")) {
        if ["topology", "record", "gpu", "shell", "cpus"].contains(&module.as_str()) {
            assert!(!text.contains("crate::host"), "{module} sees the host");
        }
    }
}

#[test]
fn every_file_says_what_it_knows() {
    for directory in ["src", "tests", "examples", "benches"] {
        for (module, text) in sources(Path::new(directory)) {
            assert!(
                text.starts_with("//!") || !text.contains("fn "),
                "{directory}: {module} does not begin with a doc comment"
            );
        }
    }
}
