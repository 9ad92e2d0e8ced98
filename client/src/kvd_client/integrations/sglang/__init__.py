"""kvd as a storage backend of SGLang's hierarchical cache; see docs/sglang.md.

--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name":
"kvd", "module_path": "kvd_client.integrations.sglang.backend", "class_name": "KvdHiCache",
"interface_v1": 1, "allocator": "shm",
"hicache_storage_pass_prefix_keys": true}'
"""
