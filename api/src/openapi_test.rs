use std::{fs, path::Path};

use super::*;

/// Each `$ref` of a document.
fn references(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(object) => {
            found.extend(
                object
                    .get("$ref")
                    .and_then(Value::as_str)
                    .map(str::to_owned),
            );
            object.values().for_each(|value| references(value, found));
        }
        Value::Array(all) => all.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

#[test]
fn every_reference_leads_to_a_schema() {
    let document = document();
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(found.len() > 10, "{found:?}");
    for reference in found {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
}

#[test]
fn every_path_parameter_is_described() {
    let document = document();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for operation in methods.as_object().unwrap().values() {
            for name in ["name", "id"] {
                let described = operation["parameters"].as_array().is_some_and(|all| {
                    let is_it = |p: &Value| p["name"] == name && p["in"] == "path";
                    all.iter().any(is_it)
                });
                assert_eq!(path.contains(&format!("{{{name}}}")), described, "{path}");
            }
        }
    }
}

/// `UPDATE=1 cargo test -p slipgate-api` writes it.
#[test]
fn the_checked_in_document_is_made_of_the_types() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json");
    let made = format!("{}\n", serde_json::to_string_pretty(&document()).unwrap());
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &made).unwrap();
    }
    assert_eq!(
        fs::read_to_string(path).unwrap(),
        made,
        "run it with UPDATE=1"
    );
}
