use super::*;

#[test]
fn a_disks_options_follow_its_file() {
    let parsed = |text: &str| {
        let spec = disk(text).unwrap();
        (
            spec.path.to_str().unwrap().to_owned(),
            spec.read_only,
            spec.cache,
        )
    };
    let own = |path: &str, read_only, cache| (path.to_owned(), read_only, cache);
    let write_back = DiskCache::WriteBack;
    assert_eq!(parsed("a,b.img"), own("a,b.img", false, write_back));
    assert_eq!(parsed("a,ro,b,ro"), own("a,ro,b", true, write_back));
    assert_eq!(
        parsed("a,cache=writethrough"),
        own("a", false, DiskCache::WriteThrough)
    );
    assert_eq!(parsed("a,cache=none,ro"), own("a", true, DiskCache::None));
    assert_eq!(parsed("a,cache=none"), own("a", false, DiskCache::None));
    assert_eq!(parsed("a,ro,cache=writeback"), own("a", true, write_back));
    assert_eq!(parsed("a,cache=unsafe"), own("a", false, DiskCache::Unsafe));
    assert_eq!(parsed("a,cache=writeback"), own("a", false, write_back));
    assert!(disk("a,b.img").unwrap().rate.is_none());
    let spec = disk("a,iops=100/100ms,ro,bandwidth=1M+2M").unwrap();
    assert_eq!((spec.path.to_str(), spec.read_only), (Some("a"), true));
    let bucket = |size, refill_ms, one_time_burst| {
        Some(slipgate_ipc::vmm::TokenBucket {
            size,
            refill_ms,
            one_time_burst,
        })
    };
    assert_eq!(spec.rate.operations, bucket(100, 100, 0));
    assert_eq!(spec.rate.bytes, bucket(1 << 20, 1_000, 2 << 20));
}

#[test]
fn an_option_without_sense_is_refused_with_a_remedy() {
    for (text, part) in [
        ("a,iops=fast", "--disk iops=fast"),
        ("a,cache=some", "give writeback"),
        ("a,ro,cache=unsafe", "read-only has no writes"),
        ("a,cache=writethrough,ro", "read-only has no writes"),
        ("a,cache=unsafe,cache=unsafe", "the cache is given twice"),
        (",ro", "there is no file in it"),
    ] {
        let error = disk(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
    let many = vec!["a".to_owned(); MAX_DISKS + 1];
    let error = disks(&many).unwrap_err().to_string();
    assert!(error.contains("8 disks at most"), "{error}");
}
