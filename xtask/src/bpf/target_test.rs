use serde_json::Value;

use super::with_atomics;

#[test]
fn adds_atomics_and_keeps_the_rest() {
    let told = r#"{"arch": "bpf", "atomic-cas": false, "min-atomic-width": 64,
        "obj-is-bitcode": true, "singlethread": true}"#;
    let spec: Value = serde_json::from_str(&with_atomics(told).unwrap()).unwrap();
    assert_eq!(spec["atomic-cas"], true);
    assert_eq!(spec["min-atomic-width"], 32);
    assert_eq!(spec["cpu"], "v3");
    assert_eq!(spec["singlethread"], false);
    assert_eq!(spec["obj-is-bitcode"], true);
}

#[test]
fn another_architecture_is_refused() {
    assert!(
        with_atomics(r#"{"arch": "x86_64"}"#)
            .unwrap_err()
            .to_string()
            .contains("x86_64")
    );
    assert!(with_atomics("bpf").is_err());
}
