use super::{Archive, kernel::needs};

/// Name, mode and contents of each entry, read as the kernel reads them.
fn unpack(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
    let mut entries = Vec::new();
    let whole = bytes.len();
    loop {
        let field = |at: usize| {
            let digits = std::str::from_utf8(&bytes[6 + at * 8..14 + at * 8]).unwrap();
            u32::from_str_radix(digits, 16).unwrap()
        };
        assert_eq!(&bytes[..6], b"070701");
        let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
        assert_eq!(bytes[110 + name_size - 1], 0);
        let name = String::from_utf8(bytes[110..110 + name_size - 1].to_vec()).unwrap();
        let contents = (110 + name_size).next_multiple_of(4);
        let end = (contents + size).next_multiple_of(4);
        assert_eq!((whole - bytes.len()) % 4, 0);
        if name == "TRAILER!!!" {
            assert_eq!(end, bytes.len());
            return entries;
        }
        entries.push((name, mode, bytes[contents..contents + size].to_vec()));
        bytes = &bytes[end..];
    }
}

#[test]
fn an_archive_has_each_folder_once_and_before_what_is_in_it() {
    let mut archive = Archive::new();
    archive.folder("/dev");
    archive.file("/modules/order", b"a\n");
    archive.program("/modules/deep/a.ko", &[7; 4099]);
    archive.folder("/modules/deep/");
    assert!(archive.contains("/modules/deep/a.ko") && !archive.contains("/modules/b.ko"));
    let folder = |name: &str| (name.to_owned(), 0o040_755, Vec::new());
    let expected = [
        folder("dev"),
        folder("modules"),
        ("modules/order".to_owned(), 0o100_644, b"a\n".to_vec()),
        folder("modules/deep"),
        ("modules/deep/a.ko".to_owned(), 0o100_755, vec![7; 4099]),
    ];
    assert_eq!(unpack(&archive.finish()), expected);
}

#[test]
fn a_module_names_what_it_needs() {
    let image = b"\x7fELF....\0license=GPL\0depends=vhost,tap,vhost_iotlb\0retpoline=Y\0";
    assert_eq!(needs(image), ["vhost", "tap", "vhost_iotlb"]);
    let alone = b"\x7fELF....\0depends=\0name=veth\0";
    assert_eq!(needs(alone), Vec::<String>::new());
}
