use super::RustcVersion;

const DEBIAN: &str = "rustc 1.96.0 (ac68faa20 2026-05-25) (built from a source tarball)
binary: rustc
commit-hash: ac68faa20c58cbccd01ee7208bf3b6e93a7d7f96
commit-date: 2026-05-25
host: x86_64-unknown-linux-gnu
release: 1.96.0
LLVM version: 22.1.8
";

#[test]
fn reads_a_release_compiler() {
    let version = RustcVersion::parse(DEBIAN).unwrap();
    assert_eq!(version.release, "1.96.0");
    assert_eq!(version.host, "x86_64-unknown-linux-gnu");
    assert_eq!(version.llvm_major, 22);
    assert!(!version.is_nightly());
}

#[test]
fn reads_a_nightly() {
    let told = DEBIAN.replace("release: 1.96.0", "release: 1.97.0-nightly");
    assert!(RustcVersion::parse(&told).unwrap().is_nightly());
}

#[test]
fn a_missing_or_odd_field_is_named() {
    let told = DEBIAN.replace("host: ", "hots: ");
    assert!(
        RustcVersion::parse(&told)
            .unwrap_err()
            .to_string()
            .contains("`host`")
    );
    let told = DEBIAN.replace("22.1.8", "twenty-two");
    assert!(
        RustcVersion::parse(&told)
            .unwrap_err()
            .to_string()
            .contains("twenty-two")
    );
}
