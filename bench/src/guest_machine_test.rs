use serde_json::json;

use super::*;

#[test]
fn a_number_is_read_and_an_error_or_a_missing_key_is_none() {
    let said = json!({"workload": "disk", "p50_us": 33.5, "count": 9});
    assert_eq!(number(&said, "p50_us").unwrap(), 33.5);
    assert_eq!(number(&said, "count").unwrap(), 9.0);
    let missing = number(&said, "p99_us").unwrap_err().to_string();
    assert!(missing.contains("no p99_us"), "{missing}");
    let failed = json!({"p50_us": 1.0, "error": "byte 7 is wrong"});
    let failed = number(&failed, "p50_us").unwrap_err().to_string();
    assert!(failed.contains("byte 7 is wrong"), "{failed}");
}

#[test]
fn what_does_not_come_is_named() {
    let mut left = 2;
    let twice = || {
        left -= 1;
        (left == 0).then_some(9)
    };
    assert_eq!(in_time("nine", twice).unwrap(), 9);
}
