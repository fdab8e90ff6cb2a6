use super::*;

fn definition(name: &str) -> VmDefinition {
    serde_json::from_value(serde_json::json!({
        "name": name,
        "tap": format!("tap-{name}"),
        "quotas": { "max_flows": 7, "tx_bytes_per_second": "10M" },
        "forwards": ["tcp:8080-8081:80-81"],
        "labels": { "tenant": "a" },
    }))
    .unwrap()
}

#[test]
fn a_successor_reads_what_was_kept() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(read(dir.path()).unwrap(), []);
    for name in ["b", "a"] {
        keep(dir.path(), &definition(name)).unwrap();
    }
    let changed = VmDefinition {
        mac: Some("52:54:00:00:00:01".into()),
        ..definition("a")
    };
    keep(dir.path(), &changed).unwrap();
    assert_eq!(read(dir.path()).unwrap(), [changed, definition("b")]);
    forget(dir.path(), "a").unwrap();
    forget(dir.path(), "a").unwrap();
    assert_eq!(read(dir.path()).unwrap(), [definition("b")]);
    forget_all(dir.path()).unwrap();
    assert_eq!(read(dir.path()).unwrap(), []);
}

#[test]
fn policies_are_kept_by_name() {
    let dir = tempfile::tempdir().unwrap();
    assert!(read_policies(dir.path()).unwrap().is_empty());
    keep_policy(dir.path(), "closed", "default = \"allow\"").unwrap();
    keep_policy(dir.path(), "closed", "default = \"deny\"").unwrap();
    let kept = read_policies(dir.path()).unwrap();
    assert_eq!(kept["closed"], "default = \"deny\"");
    forget_all(dir.path()).unwrap();
    assert!(read_policies(dir.path()).unwrap().is_empty());
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let dir = tempfile::tempdir().unwrap();
    keep(dir.path(), &definition("a")).unwrap();
    let path = path_of(dir.path(), "a");
    fs::write(&path, "{\"name\": \"a\", \"colour\": 1}").unwrap();
    let error = format!("{:#}", read(dir.path()).unwrap_err());
    assert!(error.contains(&path.display().to_string()), "{error}");
}
