import sys

from radixcache.runtime.cli import main

sys.exit(main())
